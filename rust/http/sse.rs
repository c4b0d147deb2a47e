//! Events as bytes. Everything that is ready goes out as one piece; an event is never split over two; silence is broken by comments.
//!
//! Which events there are is the response's business.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep, sleep};

use crate::error::{Code, Error};
use crate::responses::{Event, Running, Sink};

/// The content type of events.
pub(crate) const TYPE: &str = "text/event-stream";
/// A line that clients skip.
const COMMENT: &[u8] = b": keep-alive\n\n";
/// What ends a stream that said all it had to say.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";
/// Room for the first two events of a short request.
const ROOM: usize = 4096;
/// Room for a few small events; a piece that comes out longer makes its own.
const NEXT_ROOM: usize = 1024;

/// The first events go out before anything else is done. A client on the same machine is woken by them on the core that sent them, and runs when
/// this thread goes to sleep: so nothing else is done here after they are sent (the prompt is made on another thread).
enum Begin {
    /// They are to be given to hyper.
    Give,
    /// hyper has them; it sends them when it is told that there is no more for now. That is said by yielding to the runtime, which then does not
    /// wake another thread for this task, as it would if the task woke itself: on a small machine the client would have to wait for that thread.
    Send(Pin<Box<dyn Future<Output = ()> + Send>>),
    /// They are sent.
    Done,
}

/// How the events of an answer are written.
pub(crate) trait Wire: Send {
    /// Adds an event to what is to be sent, as whole blocks, or nothing where this form has no word for it.
    fn write(&mut self, event: Event<'_>, into: &mut Vec<u8>);

    /// What breaks silence: whole blocks that clients pass over.
    fn silence(&self) -> &'static [u8] {
        COMMENT
    }
}

/// As the Responses API has them.
pub(crate) struct Named;

impl Wire for Named {
    fn write(&mut self, event: Event<'_>, into: &mut Vec<u8>) {
        into.extend_from_slice(b"event: ");
        into.extend_from_slice(event.name().as_bytes());
        into.push(b'\n');
        data(&event, into);
        if event.terminal() {
            into.extend_from_slice(DONE);
        }
    }
}

/// Adds a block of data.
pub(crate) fn data(value: &impl Serialize, into: &mut Vec<u8>) {
    into.extend_from_slice(b"data: ");
    if let Err(error) = serde_json::to_writer(&mut *into, value) {
        tracing::error!(%error, "an event could not be written"); // The buffer takes everything.
    }
    into.extend_from_slice(b"\n\n");
}

/// A response as a body of server-sent events. Dropping it cancels the answer.
pub(crate) struct Events {
    running: Running,
    wire: Box<dyn Wire>,
    /// A plain vector that is given away as it is and replaced: writing into `BytesMut` takes twice as long (2.7 against 5.9 µs for the first two
    /// events), which is more than a new allocation costs.
    buffer: Vec<u8>,
    begin: Begin,
    over: bool,
    every: Duration,
    quiet_since: Instant,
    alarm: Pin<Box<Sleep>>,
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Events {
    /// The events of an answer, a comment after each `every` of silence. When `cut` is ready the response fails: the server is going away.
    pub(crate) fn new(
        mut running: Running,
        mut wire: Box<dyn Wire>,
        every: Duration,
        cut: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let mut buffer = Vec::with_capacity(ROOM);
        running.begin(&mut Writer { wire: &mut *wire, buffer: &mut buffer });
        Self {
            running,
            wire,
            buffer,
            begin: Begin::Give,
            over: false,
            every,
            quiet_since: Instant::now(),
            alarm: Box::pin(sleep(every)),
            cut: Box::pin(cut),
        }
    }

    /// Whether the last bytes have been given.
    pub(crate) fn over(&self) -> bool {
        self.over
    }

    /// What there is to send; `None` after the end.
    pub(crate) fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.over {
            return Poll::Ready(None);
        }
        match &mut self.begin {
            Begin::Give => {
                self.begin = Begin::Send(Box::pin(yield_now()));
                return Poll::Ready(Some(self.take()));
            }
            Begin::Send(sent) => {
                ready!(sent.as_mut().poll(cx));
                self.begin = Begin::Done;
            }
            Begin::Done => {}
        }
        let mut writer = Writer { wire: &mut *self.wire, buffer: &mut self.buffer };
        let polled = loop {
            match self.running.poll(cx, &mut writer) {
                // Nothing that goes out is silence too.
                Poll::Ready(false) if writer.buffer.is_empty() => {}
                polled => break polled,
            }
        };
        match polled {
            Poll::Ready(over) => self.over = over,
            Poll::Pending if self.cut.as_mut().poll(cx).is_ready() => {
                let error = Error::new(Code::ShuttingDown, "the server is going away").hint("try again");
                self.running.fail(&error, &mut writer);
                self.over = true;
            }
            Poll::Pending => {
                // Set once for many events: when it rings early it is put off, which costs less than to put it off at each event.
                ready!(self.alarm.as_mut().poll(cx));
                while self.quiet_since.elapsed() < self.every {
                    self.alarm.as_mut().reset(self.quiet_since + self.every);
                    ready!(self.alarm.as_mut().poll(cx));
                }
                self.alarm.as_mut().reset(Instant::now() + self.every);
                self.buffer.extend_from_slice(self.wire.silence());
            }
        }
        self.quiet_since = Instant::now();
        Poll::Ready(Some(self.take()))
    }

    /// What has been written; the next piece is likely to be as long.
    fn take(&mut self) -> Bytes {
        let room = self.buffer.len().max(NEXT_ROOM);
        std::mem::replace(&mut self.buffer, Vec::with_capacity(room)).into()
    }
}

/// Writes events into a buffer.
struct Writer<'a> {
    wire: &'a mut dyn Wire,
    buffer: &'a mut Vec<u8>,
}

impl Sink for Writer<'_> {
    fn event(&mut self, event: Event<'_>) {
        self.wire.write(event, self.buffer);
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::task::Waker;

    use super::*;
    use crate::engine::host::launcher;
    use crate::engine::mock::vocabulary::{EOS, FIRST_WORD, SIZE};
    use crate::engine::{Capabilities, Finish, Id, Order, Port, Settings, Step};
    use crate::models::Models;
    use crate::models::fetch::Shelf;
    use crate::responses::{Arrival, ReasoningEvents, Request};

    const EVERY: Duration = Duration::from_secs(10);
    const COMMENT_TEXT: &str = ": keep-alive\n\n";

    /// A stream, and the engine's side of it, which the test plays.
    struct Played {
        events: Events,
        port: Port,
        id: Id,
        cut: Option<tokio::sync::oneshot::Sender<()>>,
    }

    impl Played {
        async fn begin() -> Self {
            Self::of(Box::new(Named)).await
        }

        async fn of(wire: Box<dyn Wire>) -> Self {
            let (launcher, launches) = launcher(8);
            let names = ["played".to_owned()];
            let models = Models::new(&names, Shelf::new(PathBuf::new(), None), launcher, "echo", Settings::default()).unwrap();
            let hosted = models.find(None).unwrap();
            let loading = hosted.load();
            let launch = tokio::task::spawn_blocking(move || launches.next()).await.unwrap().unwrap();
            let port = launch.port;
            port.ready(Capabilities { context_length: 8192, max_batch: 1, vocab_size: SIZE, eos_ids: vec![EOS], constraints: false })
                .unwrap();
            let model = loading.model().await.unwrap();
            let arrival = Arrival { arrived: std::time::Instant::now(), resolve: None, load_wait: None, load_owner: None };
            let request = Request::from_json(br#"{"input":"hi"}"#).unwrap();
            let running = Running::start(model, request, arrival, 7, ReasoningEvents::default()).await.unwrap();
            let orders = port.poll().unwrap().unwrap();
            let [Order::Admit(admit)] = orders.as_slice() else { panic!("not admitted: {orders:?}") };
            let id = admit.id;
            let (cut, is_cut) = tokio::sync::oneshot::channel();
            let events = Events::new(running, wire, EVERY, async {
                let _ = is_cut.await;
            });
            Self { events, port, id, cut: Some(cut) }
        }

        fn push(&self, tokens: Vec<u32>, finish: Option<Finish>) {
            let gone = self.port.push(vec![Step { id: self.id, tokens, finish, logprobs: vec![] }]).unwrap();
            assert!(gone.is_empty());
        }

        /// The first events, which are sent before the rest is looked at.
        fn first(&mut self) -> String {
            let first = self.sent().unwrap();
            assert_eq!(self.sent(), None);
            first
        }

        /// What there is to send now; `None` when the stream waits.
        fn sent(&mut self) -> Option<String> {
            match self.events.poll_bytes(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(bytes) => Some(String::from_utf8(bytes.unwrap().to_vec()).unwrap()),
                Poll::Pending => None,
            }
        }
    }

    async fn advance(milliseconds: u64) {
        tokio::time::advance(Duration::from_millis(milliseconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_broken_by_the_clock_and_only_silence() {
        let mut played = Played::begin().await;
        let first = played.first();
        assert!(first.contains("event: response.created\n") && first.ends_with("\n\n"));
        for _ in 0..2 {
            assert_eq!(played.sent(), None);
            advance(9_990).await;
            assert_eq!(played.sent(), None);
            advance(20).await;
            assert_eq!(played.sent().as_deref(), Some(COMMENT_TEXT));
        }
        // Text is no silence: the ten seconds begin anew.
        assert_eq!(played.sent(), None);
        advance(6_000).await;
        played.push(vec![FIRST_WORD], None);
        assert!(played.sent().unwrap().contains("output_text.delta"));
        assert_eq!(played.sent(), None);
        advance(9_990).await;
        assert_eq!(played.sent(), None);
        advance(20).await;
        assert_eq!(played.sent().as_deref(), Some(COMMENT_TEXT));
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_form_has_no_word_for_is_silence_too() {
        /// Says that it begins, and no more.
        struct Terse;

        impl Wire for Terse {
            fn write(&mut self, event: Event<'_>, into: &mut Vec<u8>) {
                if matches!(event, Event::Created { .. }) {
                    data(&"begun", into);
                }
            }
        }

        let mut played = Played::of(Box::new(Terse)).await;
        assert_eq!(played.first(), "data: \"begun\"\n\n");
        advance(6_000).await;
        played.push(vec![FIRST_WORD], None);
        assert_eq!(played.sent(), None);
        advance(4_010).await;
        assert_eq!(played.sent().as_deref(), Some(COMMENT_TEXT));
    }

    #[tokio::test]
    async fn all_that_is_ready_is_one_piece_and_its_end_is_the_streams_end() {
        let mut played = Played::begin().await;
        played.push(vec![FIRST_WORD, FIRST_WORD + 1], None);
        played.push(vec![EOS], Some(Finish::Stop));
        assert!(played.first().starts_with("event: response.created\n"));
        let all = played.sent().unwrap();
        assert_eq!(all.matches("event: response.output_text.delta").count(), 2);
        assert!(all.starts_with("event: response.output_item.added\n") && all.ends_with("\n\ndata: [DONE]\n\n"));
        assert!(played.events.over());
        assert!(matches!(played.events.poll_bytes(&mut Context::from_waker(Waker::noop())), Poll::Ready(None)));
    }

    #[tokio::test]
    async fn what_a_slow_reader_let_gather_comes_as_one_event() {
        let mut played = Played::begin().await;
        played.first();
        played.push(vec![FIRST_WORD; 1024], None);
        assert_eq!(played.sent().unwrap().matches("event: response.output_text.delta").count(), 1024);
        for _ in 0..5 {
            played.push(vec![FIRST_WORD; 205], None);
        }
        let merged = played.sent().unwrap();
        assert_eq!(merged.matches("event: response.output_text.delta").count(), 1);
        assert!(merged.contains(r#""sequence_number":1028,"item_id""#) && merged.contains(&" a".repeat(1025)));
    }

    #[tokio::test]
    async fn a_server_that_goes_away_says_so() {
        let mut played = Played::begin().await;
        played.first();
        assert_eq!(played.sent(), None);
        played.cut.take().unwrap().send(()).unwrap();
        let last = played.sent().unwrap();
        assert!(last.starts_with("event: response.failed\n") && last.ends_with("data: [DONE]\n\n"));
    }

    #[tokio::test]
    async fn a_stream_that_is_dropped_cancels_its_answer() {
        let played = Played::begin().await;
        let (port, id) = (played.port, played.id);
        drop(played.events);
        assert_eq!(port.poll().unwrap(), Some(vec![Order::Cancel(id)]));
    }
}
