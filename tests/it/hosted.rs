//! A model in service: who starts a load, who waits for it, and what comes of engines that end.

use std::sync::Arc;

use emberd::engine::Client;
use emberd::engine::Launch;
use emberd::engine::host::Launches;
use emberd::engine::mock::{Fault, Mock};
use emberd::error::Code;
use emberd::models::catalog::Source;
use emberd::models::fetch::Shelf;
use emberd::models::{Hosted, Models, State};

use crate::http_support::{PATIENCE, gated, models, until};
use crate::worker_support::{aside, orders_after_loading};

fn hosted() -> (Models, Arc<Hosted>, Launches) {
    let (models, launches) = models(8);
    let hosted = Arc::clone(models.default_model());
    (models, hosted, launches)
}

/// The next launch: it is there once a load has got as far as the engine.
async fn launch(launches: Launches) -> (Launch, Launches) {
    aside(move || (launches.next().unwrap(), launches)).await
}

fn run(launch: Launch, mock: Mock) {
    mock.spawn(launch.port, launch.settings).unwrap();
}

#[tokio::test]
async fn one_load_serves_all_and_only_the_first_started_it() {
    let (_models, hosted, launches) = hosted();
    assert_eq!(hosted.state(), State::Absent);
    let (first, second) = (hosted.load(), hosted.load());
    assert_eq!((first.started, second.started, hosted.state()), (true, false, State::Loading));
    let (next, launches) = launch(launches).await;
    run(next, Mock::default());
    let (one, other) = (first.model().await.unwrap(), second.model().await.unwrap());
    assert!(Arc::ptr_eq(&one, &other));
    assert_eq!(hosted.state(), State::Ready);
    // Loaded already: nothing starts, and the model is there at once.
    let third = hosted.load();
    assert!(!third.started && Arc::ptr_eq(&third.model().await.unwrap(), &one));
    drop((hosted, one, other, third, _models));
    assert!(aside(move || launches.next().is_none()).await, "there was one launch in all");
}

#[tokio::test]
async fn a_load_goes_on_when_nobody_waits_for_it() {
    let (_models, hosted, launches) = hosted();
    drop(hosted.load());
    let (next, _launches) = launch(launches).await;
    run(next, Mock::default());
    until("it is ready", || hosted.state() == State::Ready).await;
}

#[tokio::test]
async fn a_load_that_failed_is_told_to_all_and_tried_again_by_the_next() {
    let (_models, hosted, launches) = hosted();
    let (first, second) = (hosted.load(), hosted.load());
    let (next, launches) = launch(launches).await;
    run(next, Mock { fault: Fault::FailLoad, ..Mock::default() });
    let error = first.model().await.err().unwrap();
    assert_eq!(error.code, Code::ModelLoadFailed);
    assert_eq!(second.model().await.err(), Some(error.clone()));
    assert_eq!(hosted.state(), State::Failed(error));
    let third = hosted.load();
    assert!(third.started);
    let (next, _launches) = launch(launches).await;
    run(next, Mock::default());
    third.model().await.unwrap();
}

#[tokio::test]
async fn where_its_own_engine_cannot_run_it_the_other_one_does_from_then_on() {
    let (models, launches) = models(8);
    let models = models.or("other", vec![Source::Builtin], &Shelf::new("unused".into(), None));
    let hosted = Arc::clone(models.default_model());
    let loading = hosted.load();
    let (next, launches) = launch(launches).await;
    assert_eq!(next.engine, "echo");
    run(next, Mock { fault: Fault::FailLoad, ..Mock::default() });
    let (next, launches) = launch(launches).await;
    assert_eq!((&*next.engine, hosted.state()), ("other", State::Loading));
    run(next, Mock { fault: Fault::FailLoad, ..Mock::default() });
    assert_eq!(loading.model().await.err().unwrap().code, Code::ModelLoadFailed, "once, and no further");
    let loading = hosted.load();
    let (next, _launches) = launch(launches).await;
    assert_eq!(next.engine, "other", "what failed is not tried again");
    run(next, Mock::default());
    loading.model().await.unwrap();
    assert_eq!(hosted.state(), State::Ready);
}

#[tokio::test]
async fn an_engine_that_can_run_a_model_has_no_other_in_its_place() {
    let (models, launches) = models(8);
    let models = models.or("other", vec![Source::Builtin], &Shelf::new("unused".into(), None));
    let loading = models.default_model().load();
    let (next, launches) = launch(launches).await;
    run(next, Mock::default());
    loading.model().await.unwrap();
    drop(models);
    assert!(aside(move || launches.next().is_none()).await, "there was one launch in all");
}

#[tokio::test]
async fn an_engine_that_died_is_loaded_anew_by_the_next_request() {
    let (_models, hosted, launches) = hosted();
    let loading = hosted.load();
    let (next, launches) = launch(launches).await;
    run(next, Mock { fault: Fault::EndAfter(0), ..Mock::default() });
    let model = loading.model().await.unwrap();
    let ask = emberd::models::Ask {
        max_tokens: 4,
        sampling: None,
        constraint: None,
        speculation: None,
        stop: vec![],
        include_stop: false,
        salt: Arc::default(),
    };
    let error = model.answer(Client::new(), vec![1], ask.clone()).unwrap().rest().await.unwrap_err();
    assert_eq!(error.code, Code::EngineFailed);
    assert_eq!(hosted.state(), State::Failed(error));
    assert!(hosted.loaded().is_none());
    let again = tokio::spawn({
        let hosted = Arc::clone(&hosted);
        async move { hosted.ready().await }
    });
    let (next, _launches) = launch(launches).await;
    run(next, Mock::default());
    let fresh = again.await.unwrap().unwrap();
    assert!(!Arc::ptr_eq(&fresh, &model));
    assert_eq!(fresh.answer(Client::new(), vec![1], ask).unwrap().rest().await.unwrap().0, " a small model keeps");
}

#[tokio::test]
async fn an_engine_that_ends_before_it_is_ready_is_a_failed_load() {
    let (_models, hosted, launches) = hosted();
    let loading = hosted.load();
    let (next, _launches) = launch(launches).await;
    drop(next);
    assert_eq!(loading.model().await.err().unwrap().code, Code::ModelLoadFailed);
}

#[tokio::test]
async fn closing_ends_a_load_in_progress_and_the_engine_that_nobody_waits_for() {
    let (models, hosted, launches) = hosted();
    let loading = hosted.load();
    let (next, _launches) = launch(launches).await;
    models.close();
    let outcome = tokio::time::timeout(PATIENCE, loading.model()).await.unwrap();
    assert_eq!(outcome.err().unwrap().code, Code::ShuttingDown);
    assert_eq!(orders_after_loading(next.port).await, None);
}

#[tokio::test]
async fn a_process_that_starts_no_engines_any_more_says_that_it_is_going() {
    let (_models, hosted, launches) = hosted();
    drop(launches);
    assert_eq!(hosted.ready().await.err().unwrap().code, Code::ShuttingDown);
}

#[tokio::test]
async fn the_room_for_an_answer_is_what_the_prompt_leaves() {
    let (_models, hosted, launches) = hosted();
    let loading = hosted.load();
    let (next, _launches) = launch(launches).await;
    let (_gate, mock) = gated();
    run(next, Mock { context_length: 10, ..mock });
    let model = loading.model().await.unwrap();
    assert_eq!((model.room(0), model.room(9)), (Ok(10), Ok(1)));
    for length in [10, 11, usize::MAX] {
        let error = model.room(length).unwrap_err();
        assert_eq!(error.code, Code::ContextLengthExceeded);
        assert!(error.message.contains(&length.to_string()) && error.message.contains("10"), "{error}");
    }
}
