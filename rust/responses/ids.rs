//! The ids of a response and its items: random where it counts, and all different.

use crate::error::{Code, Error, Result};

/// Gives out ids: 128 random bits, counted on from one to the next.
#[derive(Debug, Clone)]
pub struct Ids(u128);

impl Ids {
    /// Ids that nobody has had, and a seed below 2^53, which every JSON reader gives back as it came.
    ///
    /// # Errors
    /// `server_error` when the system has no random bytes.
    pub fn random() -> Result<(Self, u64)> {
        let mut bits = [0; 24];
        getrandom::fill(&mut bits)
            .map_err(|error| Error::new(Code::ServerError, "the system has no random bytes").detail(error.to_string()))?;
        let (first, rest) = bits.split_first_chunk().unwrap_or((&[0; 16], &[]));
        let seed = u64::from_le_bytes(*rest.first_chunk().unwrap_or(&[0; 8])) >> 11;
        Ok((Self(u128::from_le_bytes(*first)), seed))
    }

    /// Ids that are counted on from a number.
    #[must_use]
    pub fn from(number: u128) -> Self {
        Self(number)
    }

    /// The next id: the prefix and 32 hexadecimal digits.
    pub fn next(&mut self, prefix: &str) -> String {
        let id = format!("{prefix}{:032x}", self.0);
        self.0 = self.0.wrapping_add(1);
        id
    }
}
