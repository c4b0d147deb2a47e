//! Views of the library's tensors: numbers to read, and numbers that several threads write, each in a place of its own.

use std::ptr;

use ort_sys::{OrtApi, OrtValue};

use super::taken;

/// A tensor: its sizes and its numbers.
#[derive(Debug)]
pub(crate) struct Tensor<'a, T> {
    pub(crate) dims: Vec<usize>,
    pub(crate) data: &'a [T],
}

impl<T> Tensor<'_, T> {
    /// The last size, and the product of those before it.
    pub(crate) fn rows_and_columns(&self) -> (usize, usize) {
        let columns = self.dims.last().copied().unwrap_or(1);
        (self.dims.iter().rev().skip(1).product(), columns)
    }
}

/// Numbers that several threads write to, each in a place of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared<T> {
    pub(super) start: *mut T,
    pub(super) length: usize,
}

// SAFETY: `Shared::part` is what writes, and its callers promise that no two parts overlap.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<T> {}

impl<T> Shared<T> {
    /// Numbers that are borrowed for as long as the caller sees to.
    pub(crate) fn of(numbers: &mut [T]) -> Self {
        Self { start: numbers.as_mut_ptr(), length: numbers.len() }
    }

    /// Numbers `from..from + length`.
    ///
    /// # Safety
    /// As long as the part is held, no other that overlaps it may be, and nobody may read there.
    ///
    /// # Panics
    /// Where the part is not inside.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, from: usize, length: usize) -> &mut [T] {
        assert!(from.checked_add(length).is_some_and(|end| end <= self.length), "a part beyond the tensor");
        // SAFETY: it is inside, and the caller promises that nothing overlaps it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), length) }
    }

    /// Numbers `from..from + length`, to read.
    ///
    /// # Safety
    /// As long as the view is held, nobody may write there.
    ///
    /// # Panics
    /// Where they are not inside.
    pub(crate) unsafe fn view(&self, from: usize, length: usize) -> &[T] {
        assert!(from.checked_add(length).is_some_and(|end| end <= self.length), "a view beyond the tensor");
        // SAFETY: it is inside, and the caller promises that nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.start.add(from), length) }
    }

    /// Copies from numbers that are elsewhere; nothing is done where they are the same.
    ///
    /// # Safety
    /// No part of either may be held.
    pub(crate) unsafe fn take(&self, other: &Self) {
        if self.start != other.start {
            // SAFETY: both are as long as the shorter one, and of two tensors.
            unsafe { ptr::copy_nonoverlapping(other.start, self.start, self.length.min(other.length)) };
        }
    }
}

/// A view of a tensor.
///
/// # Safety
/// The value must be a tensor of elements `T` that lives as long as `'a`.
pub(super) unsafe fn tensor<'a, T: Copy>(api: &OrtApi, value: *const OrtValue) -> Result<Tensor<'a, T>, String> {
    let dims = dims(api, value)?;
    let length = dims.iter().product();
    let start = data::<T>(api, value.cast_mut())?;
    // An empty tensor may have no memory at all.
    // SAFETY: the library holds as many numbers.
    let data = if length == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(start, length) } };
    Ok(Tensor { dims, data })
}

pub(super) fn dims(api: &OrtApi, value: *const OrtValue) -> Result<Vec<usize>, String> {
    let mut info = ptr::null_mut();
    // SAFETY: the value is a tensor; the sizes are freed when they were copied.
    unsafe {
        taken(api, (api.GetTensorTypeAndShape)(value, &raw mut info))?;
        let mut count = 0;
        let mut result = taken(api, (api.GetDimensionsCount)(info, &raw mut count));
        let mut dims = vec![0_i64; count];
        if result.is_ok() {
            result = taken(api, (api.GetDimensions)(info, dims.as_mut_ptr(), count));
        }
        (api.ReleaseTensorTypeAndShapeInfo)(info);
        result?;
        Ok(dims.into_iter().map(|size| usize::try_from(size).unwrap_or(0)).collect())
    }
}

pub(super) fn data<T>(api: &OrtApi, value: *mut OrtValue) -> Result<*mut T, String> {
    let mut start = ptr::null_mut();
    // SAFETY: the value is a tensor.
    taken(api, unsafe { (api.GetTensorMutableData)(value, &raw mut start) })?;
    Ok(start.cast())
}
