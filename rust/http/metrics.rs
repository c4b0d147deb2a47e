//! `GET /metrics`: everything that is counted, in the text format that Prometheus reads (version 0.0.4).
//!
//! What the names mean stands in `docs/metrics.md`; a test holds the two together. Who counts what is not decided here.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::{Mutex, PoisonError};

use crate::engine::port::Load;
use crate::metrics::{Door, Histogram, Meter, Outcome};
use crate::models::{Hosted, Models, State};

/// The content type of the format.
pub(crate) const TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Microseconds in a second.
const SECOND: f64 = 1e6;

/// How many requests each route answered, and with which status.
#[derive(Debug, Default)]
pub(crate) struct Answered(Mutex<BTreeMap<(&'static str, u16), u64>>);

impl Answered {
    /// Counts an answer. The route is one of a handful of templates, never a path of a client's.
    pub(crate) fn count(&self, route: &'static str, status: u16) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry((route, status)).or_default() += 1;
    }
}

/// The whole page.
pub(crate) fn page(models: &Models, answered: &Answered, started: u64) -> String {
    let mut page = Page { text: String::with_capacity(16 * 1024), ..Page::default() };
    page.family("emberd_build_info", "gauge", "always 1; the version is in the label");
    page.sample("", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    page.family("process_start_time_seconds", "gauge", "when the server was started, in seconds since 1970");
    page.sample("", &[], started);
    if let Some(memory) = memory_stats::memory_stats() {
        page.family("process_resident_memory_bytes", "gauge", "memory of the process that is in use, in bytes");
        page.sample("", &[], memory.physical_mem);
    }
    page.family("emberd_http_requests_total", "counter", "answers over HTTP by route and status");
    for ((route, status), count) in answered.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        page.sample("", &[("route", route), ("status", &status.to_string())], count);
    }
    of_models(&mut page, models);
    let doors: Vec<Series<'_>> = models
        .all()
        .iter()
        .flat_map(|hosted| Door::ALL.map(|door| (&**hosted, door)))
        // A process that has no such door does not tell of it.
        .filter(|(hosted, door)| *door == Door::Http || !hosted.meters().door(*door).is_unused())
        .collect();
    of_doors(&mut page, &doors);
    page.text
}

fn of_models(page: &mut Page, models: &Models) {
    page.family("emberd_model_loaded", "gauge", "1 while the model answers without loading first");
    for hosted in models.all() {
        page.sample("", &[("model", hosted.id())], u8::from(hosted.state() == State::Ready));
    }
    page.family("emberd_engine_stalled_seconds", "gauge", "how long the engine has had work and made no step; 0 without work");
    for hosted in models.all() {
        page.sample("", &[("model", hosted.id())], hosted.stalled().unwrap_or_default().as_secs_f64());
    }
    page.family("emberd_step_sequences", "histogram", "sequences that got tokens in one step of the engine");
    for hosted in models.all() {
        page.histogram(&[("model", hosted.id())], &hosted.meters().batch, 1.0);
    }
}

/// A model's requests through one door.
type Series<'a> = (&'a Hosted, Door);

fn labels<'a>((hosted, door): &Series<'a>) -> [(&'static str, &'a str); 2] {
    [("door", door.name()), ("model", hosted.id())]
}

fn meter<'a>((hosted, door): &Series<'a>) -> &'a Meter {
    hosted.meters().door(*door)
}

fn of_doors(page: &mut Page, doors: &[Series<'_>]) {
    page.family("emberd_requests_total", "counter", "requests that are over, by how they ended");
    for series in doors {
        let [door, model] = labels(series);
        for outcome in Outcome::ALL {
            page.sample("", &[door, model, ("outcome", outcome.name())], meter(series).outcomes(outcome));
        }
    }
    page.family("emberd_requests_in_flight", "gauge", "requests that have been taken and are not over");
    numbers(page, doors, Meter::in_flight);
    let load = |(hosted, door): &Series<'_>| hosted.loaded().map(|model| model.engine.load_of(*door)).unwrap_or_default();
    let loads: Vec<Load> = doors.iter().map(load).collect();
    page.family("emberd_queue_length", "gauge", "requests that wait for a place in the engine");
    for (series, load) in doors.iter().zip(&loads) {
        page.sample("", &labels(series), load.waiting);
    }
    page.family("emberd_batch_size", "gauge", "requests in the engine");
    for (series, load) in doors.iter().zip(&loads) {
        page.sample("", &labels(series), load.running);
    }
    page.family("emberd_prompt_tokens_total", "counter", "tokens of prompts that the engine has taken");
    numbers(page, doors, |meter| meter.prompt_tokens.get());
    page.family("emberd_cached_tokens_total", "counter", "those of them that an earlier request had left read");
    numbers(page, doors, |meter| meter.cached_tokens.get());
    page.family("emberd_output_tokens_total", "counter", "tokens of answers");
    numbers(page, doors, |meter| meter.output_tokens.get());
    page.family("emberd_time_to_first_token_seconds", "histogram", "from when the request was there to its first token");
    times(page, doors, |meter| &meter.first_token);
    page.family("emberd_time_between_tokens_seconds", "histogram", "between two steps that brought one request tokens");
    times(page, doors, |meter| &meter.between_tokens);
}

fn numbers(page: &mut Page, doors: &[Series<'_>], number: impl Fn(&Meter) -> u64) {
    for series in doors {
        page.sample("", &labels(series), number(meter(series)));
    }
}

fn times(page: &mut Page, doors: &[Series<'_>], histogram: impl Fn(&Meter) -> &Histogram) {
    for series in doors {
        page.histogram(&labels(series), histogram(meter(series)), SECOND);
    }
}

/// A page as it grows, with the name of the family that was begun last. Writing to a string cannot fail.
#[derive(Default)]
struct Page {
    text: String,
    name: &'static str,
}

impl Page {
    /// Begins a family, of which all samples are until the next one.
    fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.name = name;
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, end: &str, labels: &[(&str, &str)], value: impl Display) {
        let _ = write!(self.text, "{}{end}", self.name);
        for (at, (label, text)) in labels.iter().enumerate() {
            let _ = write!(self.text, "{}{label}=\"{}\"", if at == 0 { '{' } else { ',' }, Escaped(text));
        }
        let _ = writeln!(self.text, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// A histogram whose values are told in units that are so many times as large.
    #[allow(clippy::cast_precision_loss)] // Of times and counts, 52 bits tell all that matters.
    fn histogram(&mut self, labels: &[(&str, &str)], histogram: &Histogram, unit: f64) {
        let mut total = 0;
        for (bound, count) in histogram.buckets() {
            let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| (bound as f64 / unit).to_string());
            let labels: Vec<_> = labels.iter().copied().chain([("le", bound.as_str())]).collect();
            self.sample("_bucket", &labels, count);
            total = count;
        }
        self.sample("_sum", labels, histogram.sum() as f64 / unit);
        self.sample("_count", labels, total);
    }
}

/// The text of a label.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            '\\' => f.write_str("\\\\"),
            '"' => f.write_str("\\\""),
            '\n' => f.write_str("\\n"),
            other => f.write_char(other),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Settings;
    use crate::engine::host::launcher;
    use crate::models::fetch::Shelf;

    #[test]
    fn samples_are_written_as_the_format_has_them() {
        let mut page = Page::default();
        page.family("a_total", "counter", "what a is");
        page.sample("", &[("model", "a\\b\"c\nd"), ("door", "http")], 7);
        page.family("b_seconds", "histogram", "what b is");
        let histogram = Histogram::new(&[500_000, 2_000_000]);
        [500_000, 600_000, 3_000_000].into_iter().for_each(|value| histogram.add(value));
        page.histogram(&[("model", "m")], &histogram, SECOND);
        let expected = "\
# HELP a_total what a is
# TYPE a_total counter
a_total{model=\"a\\\\b\\\"c\\nd\",door=\"http\"} 7
# HELP b_seconds what b is
# TYPE b_seconds histogram
b_seconds_bucket{model=\"m\",le=\"0.5\"} 1
b_seconds_bucket{model=\"m\",le=\"2\"} 2
b_seconds_bucket{model=\"m\",le=\"+Inf\"} 3
b_seconds_sum{model=\"m\"} 4.1
b_seconds_count{model=\"m\"} 3
";
        assert_eq!(page.text, expected);
    }

    #[test]
    fn the_documentation_has_every_family_and_no_other() {
        let (launcher, _launches) = launcher(1);
        let models = Models::new(&["m".to_owned()], Shelf::new("unused".into(), None), launcher, "mock", Settings::default()).unwrap();
        let page = page(&models, &Answered::default(), 7);
        let told: Vec<(&str, &str)> =
            page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).filter_map(|line| line.split_once(' ')).collect();
        let documented: Vec<(&str, &str)> = include_str!("../../docs/metrics.md")
            .lines()
            .filter_map(|line| line.strip_prefix("| `"))
            .filter_map(|line| line.split_once("` | "))
            .map(|(name, rest)| (name, rest.split([' ', ':']).next().unwrap()))
            .collect();
        assert_eq!(told, documented);
    }
}
