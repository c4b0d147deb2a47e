//! The chunked transfer coding (RFC 9112, section 7.1), decoded in place as bytes arrive: the payload is handed on as slices of the
//! read buffer, nothing is copied. It knows no HTTP head and no events.

use crate::Failure;

/// Longest line of a chunk's size (with extensions) or of a trailer that is accepted, in bytes.
const MAX_LINE: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In the hexadecimal size: what it is so far, and how many bytes of the line there were.
    Size {
        size: u64,
        digits: usize,
        line: usize,
    },
    /// Behind the size, up to the line's end.
    Extension {
        size: u64,
        line: usize,
    },
    Data {
        left: u64,
    },
    /// The CRLF behind a chunk's data.
    DataEnd,
    /// A trailer's line, after the last chunk: how long it is so far.
    Trailer {
        line: usize,
    },
    Done,
}

/// Where the decoder stands in one body.
#[derive(Debug)]
pub(crate) struct Decoder {
    state: State,
}

impl Decoder {
    /// A decoder at the first byte of a body.
    pub(crate) fn new() -> Self {
        Self { state: State::Size { size: 0, digits: 0, line: 0 } }
    }

    /// Whether the last chunk and its trailer have been read.
    pub(crate) fn done(&self) -> bool {
        self.state == State::Done
    }

    /// Takes the next bytes of the body, gives the payload among them to `sink`, and returns how many bytes were used: all of
    /// them, or fewer when the body ended before.
    ///
    /// # Errors
    /// When the bytes are not of the chunked coding.
    pub(crate) fn feed(&mut self, input: &[u8], mut sink: impl FnMut(&[u8]) -> Result<(), Failure>) -> Result<usize, Failure> {
        let mut at = 0;
        while at < input.len() && self.state != State::Done {
            let byte = input[at];
            match self.state {
                State::Size { size, digits, line } => {
                    at += 1;
                    self.state = match (byte as char).to_digit(16) {
                        Some(digit) if digits < 15 => {
                            State::Size { size: size * 16 + u64::from(digit), digits: digits + 1, line: line + 1 }
                        }
                        Some(_) => return Err("a chunk's size has more than 15 digits".into()),
                        None if digits == 0 => {
                            return Err(format!("expected a chunk's size, got byte {byte:#04x}").into());
                        }
                        None if byte == b'\n' => after_size(size),
                        None => State::Extension { size, line: line + 1 },
                    };
                }
                State::Extension { size, line } => {
                    at += 1;
                    self.state = match byte {
                        b'\n' => after_size(size),
                        _ if line > MAX_LINE => {
                            return Err("a chunk's extension is too long".into());
                        }
                        _ => State::Extension { size, line: line + 1 },
                    };
                }
                State::Data { left } => {
                    let take = usize::try_from(left).unwrap_or(usize::MAX).min(input.len() - at);
                    sink(&input[at..at + take])?;
                    at += take;
                    self.state = match left - take as u64 {
                        0 => State::DataEnd,
                        rest => State::Data { left: rest },
                    };
                }
                State::DataEnd => {
                    at += 1;
                    match byte {
                        b'\r' => {}
                        b'\n' => self.state = State::Size { size: 0, digits: 0, line: 0 },
                        _ => {
                            return Err(format!("expected the end of a chunk, got byte {byte:#04x}").into());
                        }
                    }
                }
                State::Trailer { line } => {
                    at += 1;
                    self.state = match byte {
                        b'\n' if line == 0 => State::Done,
                        b'\n' => State::Trailer { line: 0 },
                        b'\r' => State::Trailer { line },
                        _ if line > MAX_LINE => return Err("a trailer is too long".into()),
                        _ => State::Trailer { line: line + 1 },
                    };
                }
                State::Done => {}
            }
        }
        Ok(at)
    }
}

fn after_size(size: u64) -> State {
    if size == 0 { State::Trailer { line: 0 } } else { State::Data { left: size } }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = b"4\r\nWiki\r\n6;name=value\r\npedia \r\nE\r\nin \r\n\r\nchunks.\r\n0\r\nExpires: never\r\n\r\n";

    fn decode(pieces: &[&[u8]]) -> Result<(Vec<u8>, usize, bool), Failure> {
        let mut decoder = Decoder::new();
        let mut payload = Vec::new();
        let mut used = 0;
        for piece in pieces {
            used += decoder.feed(piece, |part| {
                payload.extend_from_slice(part);
                Ok(())
            })?;
        }
        Ok((payload, used, decoder.done()))
    }

    #[test]
    fn a_body_reads_the_same_however_it_is_cut() {
        for cut in 0..=BODY.len() {
            let (payload, used, done) = decode(&[&BODY[..cut], &BODY[cut..]]).unwrap();
            assert_eq!(payload, b"Wikipedia in \r\n\r\nchunks.", "cut at {cut}");
            assert_eq!(used, BODY.len());
            assert!(done);
        }
    }

    #[test]
    fn bytes_behind_the_body_are_left_alone() {
        let mut longer = BODY.to_vec();
        longer.extend_from_slice(b"HTTP/1.1 200 OK");
        let (_, used, done) = decode(&[&longer]).unwrap();
        assert_eq!(used, BODY.len());
        assert!(done);
    }

    #[test]
    fn a_body_that_stops_early_is_not_done() {
        let (_, _, done) = decode(&[&BODY[..BODY.len() - 1]]).unwrap();
        assert!(!done);
    }

    #[test]
    fn what_is_not_chunked_is_refused() {
        for wrong in [&b"xyz\r\n"[..], b"\r\n", b"3\r\nabcd\r\n", b"1234567890abcdef0\r\n"] {
            assert!(decode(&[wrong]).is_err(), "{wrong:?}");
        }
    }
}
