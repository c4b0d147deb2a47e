//! Cuts a byte stream into lines: capped in length, blank lines skipped, nothing decoded.
//!
//! A line over the cap is thrown away as it comes, so that it costs no memory, and reported once its end is seen.

use bytes::{Buf, BytesMut};

/// Memory that an emptied buffer may keep for the next line.
const KEEP: usize = 64 * 1024;

/// What was found in the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A line without its newline; never blank.
    Whole(BytesMut),
    /// A line of this many bytes was thrown away.
    TooLong(u64),
}

/// Lines of one stream. Read into [`Frames::buffer`], then take lines until there is none.
#[derive(Debug)]
pub struct Frames {
    buffer: BytesMut,
    /// How much of the buffer is known to hold no newline.
    scanned: usize,
    /// Bytes of the line that is being thrown away.
    dropped: u64,
    max: usize,
}

impl Frames {
    /// Lines of at most `max` bytes, the newline not counted.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self { buffer: BytesMut::new(), scanned: 0, dropped: 0, max }
    }

    /// Where the stream's bytes go.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// The next line, if a whole one is here.
    pub fn line(&mut self) -> Option<Line> {
        loop {
            let fresh = self.buffer.get(self.scanned..).unwrap_or_default();
            let Some(at) = memchr::memchr(b'\n', fresh).map(|at| at + self.scanned) else {
                if self.buffer.len() > self.max || self.dropped > 0 {
                    self.dropped += self.buffer.len() as u64;
                    self.buffer.clear();
                }
                self.scanned = self.buffer.len();
                if self.buffer.is_empty() && self.buffer.capacity() > KEEP {
                    self.buffer = BytesMut::new();
                }
                return None;
            };
            let line = self.buffer.split_to(at);
            self.buffer.advance(1);
            self.scanned = 0;
            if line.len() > KEEP {
                // The rest would hold on to the whole of the line's memory.
                self.buffer = BytesMut::from(&self.buffer[..]);
            }
            let dropped = std::mem::take(&mut self.dropped);
            if dropped > 0 || line.len() > self.max {
                return Some(Line::TooLong(dropped + line.len() as u64));
            }
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Some(Line::Whole(line));
            }
        }
    }

    /// What is left when the stream ends without a newline: a line as well.
    pub fn finish(&mut self) -> Option<Line> {
        let rest = std::mem::take(&mut self.buffer);
        let dropped = std::mem::take(&mut self.dropped);
        self.scanned = 0;
        if dropped > 0 || rest.len() > self.max {
            return Some(Line::TooLong(dropped + rest.len() as u64));
        }
        (!rest.iter().all(u8::is_ascii_whitespace)).then_some(Line::Whole(rest))
    }
}
