//! Memory that is not needed for now.

/// Tells the system that a constant is not read for now. Where it lies in a file that is mapped, its pages leave this process and come back when they are read; elsewhere nothing happens.
#[cfg(target_os = "linux")]
pub(crate) fn unneeded(bytes: &[u8]) {
    let page = rustix::param::page_size();
    let range = bytes.as_ptr_range();
    let (start, end) = ((range.start as usize).next_multiple_of(page), range.end as usize / page * page);
    if start < end {
        // A system that has no such advice keeps the pages, as it would have.
        // SAFETY: it is advice that changes no content: pages of a file are dropped, others are kept or written to swap.
        let _: Result<(), _> = unsafe { rustix::mm::madvise(start as *mut _, end - start, rustix::mm::Advice::LinuxPageOut) };
    }
}

/// Other systems see by themselves what is not used.
#[cfg(not(target_os = "linux"))]
pub(crate) fn unneeded(_: &[u8]) {}
