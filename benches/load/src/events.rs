//! Reads a stream of server-sent events as slices and counts what is in it: events, `response.output_text.delta` events, and the
//! terminal event with the tokens it reports. It looks at the first bytes of each line only, so that counting costs a small part of
//! what making the events costs; the terminal event alone is read in full.

use crate::Failure;

/// How much of a line is looked at: enough for any event's name, and for the start of a data line where `type` comes first.
const PREFIX: usize = 128;

/// What kind of event a line has named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Delta,
    /// `response.completed` or `response.incomplete`.
    Terminal,
    /// `response.failed`, `response.cancelled` or `error`.
    Failed,
    Other,
    /// `[DONE]`: the end mark, which is not an event of the API.
    Mark,
}

/// What one stream held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Events, `[DONE]` not among them.
    pub(crate) events: u64,
    /// `response.output_text.delta` events.
    pub(crate) deltas: u64,
    /// Bytes of the stream.
    pub(crate) bytes: u64,
    /// Terminal events that are not failures.
    pub(crate) terminals: u64,
    /// `usage.output_tokens` of the terminal event.
    pub(crate) output_tokens: Option<u64>,
    /// `usage.input_tokens` of the terminal event.
    pub(crate) input_tokens: Option<u64>,
}

/// Reads one stream.
#[derive(Debug, Default)]
pub(crate) struct Scanner {
    /// The current line as far as it came in an earlier slice, cut at `PREFIX` except in a terminal event.
    carried: Vec<u8>,
    in_line: bool,
    kind: Option<Kind>,
    has_data: bool,
    tally: Tally,
}

impl Scanner {
    /// What has been counted so far.
    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Takes the next bytes of the stream.
    ///
    /// # Errors
    /// When an event says that the response failed.
    pub(crate) fn feed(&mut self, mut slice: &[u8]) -> Result<(), Failure> {
        self.tally.bytes += slice.len() as u64;
        while let Some(end) = memchr::memchr(b'\n', slice) {
            let (line, rest) = (&slice[..end], &slice[end + 1..]);
            if self.in_line {
                self.carry(line);
                let whole = std::mem::take(&mut self.carried);
                self.line(&whole)?;
                self.carried = whole;
                self.carried.clear();
                self.in_line = false;
            } else {
                self.line(line)?;
            }
            slice = rest;
        }
        if !slice.is_empty() {
            self.in_line = true;
            self.carry(slice);
        }
        Ok(())
    }

    /// What the stream held, once its body has ended.
    ///
    /// # Errors
    /// When it has no terminal event, or more than one, or ends within an event.
    pub(crate) fn finish(self) -> Result<Tally, Failure> {
        if self.in_line || self.kind.is_some() || self.has_data {
            return Err("the stream ended within an event".into());
        }
        match self.tally.terminals {
            1 => Ok(self.tally),
            0 => Err(format!("the stream ended after {} events without a terminal event", self.tally.events).into()),
            many => Err(format!("the stream has {many} terminal events").into()),
        }
    }

    fn carry(&mut self, bytes: &[u8]) {
        let room = if self.kind == Some(Kind::Terminal) { usize::MAX } else { PREFIX };
        let take = bytes.len().min(room.saturating_sub(self.carried.len()));
        self.carried.extend_from_slice(&bytes[..take]);
    }

    fn line(&mut self, line: &[u8]) -> Result<(), Failure> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return self.dispatch();
        }
        if let Some(name) = line.strip_prefix(b"event:") {
            self.kind = Some(kind_of(name.trim_ascii()));
        } else if let Some(data) = line.strip_prefix(b"data:") {
            self.has_data = true;
            let data = data.trim_ascii();
            match self.kind {
                None => self.kind = Some(kind_of_data(&data[..data.len().min(PREFIX)])),
                Some(Kind::Terminal) => {
                    let usage = |key: &str| number_after(data, key);
                    self.tally.output_tokens = usage("\"output_tokens\":");
                    self.tally.input_tokens = usage("\"input_tokens\":");
                }
                Some(Kind::Failed) => {
                    let shown = String::from_utf8_lossy(&data[..data.len().min(PREFIX)]);
                    return Err(format!("the server ended a stream with a failure: {shown}").into());
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn dispatch(&mut self) -> Result<(), Failure> {
        let (kind, had_data) = (self.kind.take(), std::mem::take(&mut self.has_data));
        let Some(kind) = kind.filter(|_| had_data) else {
            return Ok(());
        };
        if self.tally.terminals > 0 && kind != Kind::Mark {
            return Err("an event follows the terminal event".into());
        }
        match kind {
            Kind::Mark => return Ok(()),
            Kind::Delta => self.tally.deltas += 1,
            Kind::Terminal => self.tally.terminals += 1,
            Kind::Failed => return Err("the server ended a stream with a failure".into()),
            Kind::Other => {}
        }
        self.tally.events += 1;
        Ok(())
    }
}

fn kind_of(name: &[u8]) -> Kind {
    match name {
        b"response.output_text.delta" => Kind::Delta,
        b"response.completed" | b"response.incomplete" => Kind::Terminal,
        b"response.failed" | b"response.cancelled" | b"error" => Kind::Failed,
        _ => Kind::Other,
    }
}

/// The kind of an event without an `event:` line, from its `type`.
fn kind_of_data(data: &[u8]) -> Kind {
    const KEY: &[u8] = b"\"type\":\"";
    if data == b"[DONE]" {
        return Kind::Mark;
    }
    let Some(start) = memchr::memmem::find(data, KEY) else {
        return Kind::Other;
    };
    let name = &data[start + KEY.len()..];
    kind_of(&name[..memchr::memchr(b'"', name).unwrap_or(name.len())])
}

/// The number behind the last occurrence of `key`: usage stands at the end of the object, behind any text that could hold the key.
fn number_after(data: &[u8], key: &str) -> Option<u64> {
    let start = memchr::memmem::rfind(data, key.as_bytes())? + key.len();
    let digits = data[start..].trim_ascii_start();
    let end = digits.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(digits.len());
    std::str::from_utf8(&digits[..end]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = concat!(
        "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0}\n\n",
        ": keep-alive\n\n",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n",
        "event: response.output_text.delta\r\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"b\"}\r\n\r\n",
        "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":[{\"text\":\"",
        "a long text, long enough that it goes past what is looked at of other lines: lorem ipsum dolor sit amet consectetur",
        "\"}],\"usage\":{\"input_tokens\":12,\"output_tokens\":34,\"total_tokens\":46}}}\n\n",
        "data: [DONE]\n\n",
    );

    fn scan(pieces: &[&str]) -> Result<Tally, Failure> {
        let mut scanner = Scanner::default();
        for piece in pieces {
            scanner.feed(piece.as_bytes())?;
        }
        scanner.finish()
    }

    #[test]
    fn a_stream_counts_the_same_however_it_is_cut() {
        let expected =
            Tally { events: 4, deltas: 2, bytes: STREAM.len() as u64, terminals: 1, output_tokens: Some(34), input_tokens: Some(12) };
        for cut in 0..=STREAM.len() {
            assert_eq!(scan(&[&STREAM[..cut], &STREAM[cut..]]).unwrap(), expected, "cut at {cut}");
        }
    }

    #[test]
    fn events_without_a_name_are_told_by_their_type() {
        let tally = scan(&["data: {\"type\":\"response.output_text.delta\"}\n\ndata: {\"type\":\"response.incomplete\"}\n\n"]).unwrap();
        assert_eq!((tally.events, tally.deltas, tally.terminals), (2, 1, 1));
    }

    #[test]
    fn a_stream_without_its_terminal_event_is_refused() {
        let end = STREAM.find("event: response.completed").unwrap();
        assert!(scan(&[&STREAM[..end]]).unwrap_err().to_string().contains("without a terminal event"));
    }

    #[test]
    fn a_stream_that_ends_within_an_event_is_refused() {
        assert!(scan(&[&STREAM[..STREAM.len() - 1]]).unwrap_err().to_string().contains("within an event"));
    }

    #[test]
    fn a_failure_and_an_event_too_many_are_refused() {
        let failed = "event: response.failed\ndata: {\"type\":\"response.failed\"}\n\n";
        assert!(scan(&[failed]).unwrap_err().to_string().contains("failure"));
        let twice = "data: {\"type\":\"response.completed\"}\n\n".repeat(2);
        assert!(scan(&[&twice]).unwrap_err().to_string().contains("follows the terminal event"));
    }
}
