//! Huge pages, as the system offers them.

use std::io;

/// The size of a huge page; `None` if the system has none, or does not offer them.
#[must_use]
pub fn huge_page_bytes() -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}"));
    let allowed = read("enabled").is_ok_and(|modes| !modes.contains("[never]"));
    read("hpage_pmd_size").ok().and_then(|size| size.trim().parse().ok()).filter(|size| allowed && *size > 0)
}

/// Moves memory of this process onto huge pages, at once; users of the memory do not notice. Takes about a millisecond a page.
///
/// # Errors
/// The system's: `EAGAIN`, `EBUSY` and `ENOMEM` where no huge page was free, or a small one was in use elsewhere; others
/// where this memory, or this system (Linux before 6.1), has no huge pages.
///
/// # Safety
/// `start` and `bytes` are multiples of a huge page, and all of it stays mapped during the call.
pub unsafe fn collapse(start: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: the caller's promise; what is in the pages stays the same.
    match unsafe { libc::madvise(start as *mut libc::c_void, bytes as usize, libc::MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Asks for huge pages where memory that was just allocated is touched first. Does nothing where there are none.
pub fn prefer_huge(start: *mut u8, bytes: usize) {
    // SAFETY: it changes how pages come, and nothing that is in them; what is not mapped, or not page-aligned, is an error.
    let _ = unsafe { libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE) };
}
