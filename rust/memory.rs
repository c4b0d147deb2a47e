//! Gives memory back to the system after work that took much of it.
//!
//! The allocator of glibc keeps what was freed below the top of its arenas: after a few requests of megabytes a process would stay as large as they made
//! it, for as long as it is idle.

/// Gives back what is free, on a thread of its own; takes milliseconds. Where the system's allocator does that by itself, nothing is done. Must be called
/// within a runtime.
pub(crate) fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    tokio::task::spawn_blocking(|| {
        // SAFETY: it has no preconditions, and takes the allocator's own locks.
        #[allow(unsafe_code)]
        unsafe {
            libc::malloc_trim(0);
        }
    });
}
