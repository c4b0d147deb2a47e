//! Cuts a byte stream into lines: capped in length, blank lines skipped, nothing decoded.
//!
//! A line over the cap is thrown away as it comes, so that it costs no memory, and reported once its end is seen.

use bytes::{Buf, BytesMut};

/// Memory that an emptied buffer may keep for the next line.
const KEEP: usize = 64 * 1024;

/// Bytes that are kept of a line that is thrown away.
const HEAD: usize = 4 * 1024;

/// What was found in the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A line without its newline; never blank.
    Whole(BytesMut),
    /// A line was thrown away.
    TooLong {
        /// How many bytes it had.
        length: u64,
        /// The first of them.
        head: BytesMut,
    },
}

/// Lines of one stream. Read into [`Frames::buffer`], then take lines until there is none.
#[derive(Debug)]
pub struct Frames {
    buffer: BytesMut,
    /// How much of the buffer is known to hold no newline.
    scanned: usize,
    /// Bytes of the line that is being thrown away.
    dropped: u64,
    /// The first of them: who sent it is to be answered under its id.
    head: BytesMut,
    max: usize,
}

impl Frames {
    /// Lines of at most `max` bytes, the newline not counted.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self { buffer: BytesMut::new(), scanned: 0, dropped: 0, head: BytesMut::new(), max }
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
                    self.drop_buffer();
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
            if self.dropped > 0 || line.len() > self.max {
                return Some(self.too_long(&line));
            }
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Some(Line::Whole(line));
            }
        }
    }

    /// What is left when the stream ends without a newline: a line as well.
    pub fn finish(&mut self) -> Option<Line> {
        let rest = std::mem::take(&mut self.buffer);
        self.scanned = 0;
        if self.dropped > 0 || rest.len() > self.max {
            return Some(self.too_long(&rest));
        }
        (!rest.iter().all(u8::is_ascii_whitespace)).then_some(Line::Whole(rest))
    }

    fn drop_buffer(&mut self) {
        if self.dropped == 0 {
            self.head = BytesMut::from(&self.buffer[..self.buffer.len().min(HEAD)]);
        }
        self.dropped += self.buffer.len() as u64;
        self.buffer.clear();
    }

    /// A line whose end has been seen, with what was thrown away of it before.
    fn too_long(&mut self, end: &[u8]) -> Line {
        let dropped = std::mem::take(&mut self.dropped);
        let head = if dropped == 0 { BytesMut::from(&end[..end.len().min(HEAD)]) } else { std::mem::take(&mut self.head) };
        Line::TooLong { length: dropped + end.len() as u64, head }
    }
}
