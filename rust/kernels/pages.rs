//! Memory that is not needed for now.

/// Gives up this process's view of the pages of a file that a constant lies in, where it is mapped: they stay in the system's cache, and come back when they are read. Pages that
/// are no file's, or were written to, are left alone, and so is everything on systems other than Linux.
pub(crate) fn unneeded(bytes: &[u8]) {
    #[cfg(target_os = "linux")]
    linux::unneeded(bytes);
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::mm::{Advice, madvise};

    /// Of a page in `/proc/self/pagemap`: it is in memory, and it is that of a file, not a copy that was written to.
    const OF_A_FILE: u64 = 1 << 63 | 1 << 61;

    pub(super) fn unneeded(bytes: &[u8]) {
        let page = rustix::param::page_size();
        let range = bytes.as_ptr_range();
        let (first, end) = ((range.start as usize).div_ceil(page), range.end as usize / page);
        let mut entries = vec![[0_u8; 8]; end.saturating_sub(first)];
        let read = File::open("/proc/self/pagemap").and_then(|map| map.read_exact_at(entries.as_flattened_mut(), first as u64 * 8));
        if read.is_err() {
            return;
        }
        let mut at = first;
        for run in entries.chunk_by(|one, other| of_a_file(*one) == of_a_file(*other)) {
            if of_a_file(run[0]) {
                // Where it fails the pages stay.
                // SAFETY: the pages are as their file has them, so reading them anew gives the same; they are inside the bytes that the caller borrows.
                let _: Result<(), _> = unsafe { madvise((at * page) as *mut _, run.len() * page, Advice::LinuxDontNeed) };
            }
            at += run.len();
        }
    }

    fn of_a_file(entry: [u8; 8]) -> bool {
        u64::from_le_bytes(entry) & OF_A_FILE == OF_A_FILE
    }

    #[cfg(test)]
    mod tests {
        use std::io::Write;

        use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

        use super::*;

        /// Pages of a range that are in memory as those of a file.
        fn present(bytes: &[u8]) -> usize {
            let page = rustix::param::page_size();
            let mut entries = vec![[0_u8; 8]; bytes.len() / page];
            let map = File::open("/proc/self/pagemap").unwrap();
            map.read_exact_at(entries.as_flattened_mut(), (bytes.as_ptr() as usize / page * 8) as u64).unwrap();
            entries.into_iter().filter(|entry| of_a_file(*entry)).count()
        }

        #[test]
        fn what_is_a_files_leaves_and_what_was_written_stays() {
            let (page, pages) = (rustix::param::page_size(), 64);
            let mut file = tempfile::tempfile().unwrap();
            let content: Vec<u8> = (0..pages * page).map(|at| (at / 7) as u8).collect();
            file.write_all(&content).unwrap();
            // SAFETY: a private mapping of a file that nobody else has.
            let bytes = unsafe {
                let start =
                    mmap(std::ptr::null_mut(), content.len(), ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE, &file, 0).unwrap();
                std::slice::from_raw_parts_mut(start.cast::<u8>(), content.len())
            };
            assert_eq!(bytes, content);
            bytes[5 * page] ^= 0xff;
            assert_eq!(present(bytes), pages - 1);
            unneeded(&bytes[..bytes.len() - 1]);
            assert_eq!(present(bytes), 1, "the last page is not wholly inside");
            assert_eq!(bytes[5 * page], content[5 * page] ^ 0xff);
            bytes[5 * page] ^= 0xff;
            assert_eq!(bytes, content);
            unneeded(&content);
            assert_eq!(bytes, content, "memory of no file is left alone");
            // SAFETY: nothing uses it any more.
            unsafe { munmap(bytes.as_mut_ptr().cast(), content.len()).unwrap() };
        }
    }
}
