//! Huge pages for buffers that peers on this host read again and again.
//!
//! `process_vm_readv` looks up and pins every page that it copies from, which costs less with huge pages than with pages of
//! 4 KiB: an all-reduce of 2 ranks reaches 76 to 83 % of the copy bound instead of 71, one of 4 ranks 57 to 60 instead of 52
//! (docs/benchmarks/README.md, "Measured figures"). torch allocates without asking for huge pages, and asking
//! later (`MADV_HUGEPAGE`) does not affect memory that is in use. `MADV_COLLAPSE` (Linux 6.1) copies such memory onto huge
//! pages at once; its users do not notice.

use penstock_net::pages::{collapse, huge_page_bytes};
use std::collections::HashMap;
use std::io::ErrorKind;

/// Moves frequently used buffers onto huge pages, a few at a time.
#[derive(Debug)]
pub(crate) struct HugePages {
    /// The size of a huge page; 0 if there is none to use.
    size: u64,
    buffers: HashMap<(u64, u64), Buffer>,
}

#[derive(Debug, Default)]
struct Buffer {
    uses: u32,
    /// The end of the part that was tried.
    done: u64,
}

impl HugePages {
    pub(crate) fn new() -> HugePages {
        HugePages { size: huge_page_bytes().unwrap_or(0), buffers: HashMap::new() }
    }

    /// Buffers of this process, as address and length, that others are about to read. From the [`USES`]th time on each is
    /// moved, at most [`MOST_PAGES`] huge pages a call, each of which takes about a millisecond. A buffer is moved only once:
    /// memory that returns to the system and comes back at the same address is not moved again.
    ///
    /// # Safety
    /// The buffers stay mapped during the call.
    pub(crate) unsafe fn used(&mut self, buffers: impl Iterator<Item = (u64, u64)>) {
        let mut budget = MOST_PAGES * self.size;
        for (address, len) in buffers.filter(|(_, len)| self.size > 0 && *len >= 2 * self.size) {
            if self.buffers.len() >= MOST_BUFFERS && !self.buffers.contains_key(&(address, len)) {
                self.buffers.clear();
            }
            let buffer = self.buffers.entry((address, len)).or_default();
            buffer.uses = buffer.uses.saturating_add(1);
            let start = address.next_multiple_of(self.size).max(buffer.done);
            let end = (address + len) / self.size * self.size;
            if buffer.uses < USES || start >= end || budget == 0 {
                continue;
            }
            let bytes = (end - start).min(budget);
            budget -= bytes;
            buffer.done = start + bytes;
            // SAFETY: the pages are mapped, and their content stays the same.
            if unsafe { collapse(start, bytes) }.is_err_and(|error| !is_shortage(&error)) {
                // This memory, or this system, has no huge pages.
                buffer.done = end;
            }
        }
    }
}

/// Whether no huge page was free, or a small one was in use elsewhere: the next pages may succeed.
fn is_shortage(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ResourceBusy | ErrorKind::OutOfMemory)
}

/// A buffer that was used twice will be used again: DDP's buckets and FSDP's flat parameters are in every step.
const USES: u32 = 2;
/// How many huge pages may delay one operation, and the I/O thread with it: some 16 ms.
const MOST_PAGES: u64 = 16;
/// How many buffers are remembered: more than a model has, and 200 KiB at most.
const MOST_BUFFERS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Kibibytes of this process's huge pages at an address.
    fn huge_kib(address: u64) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("/proc");
        let mut inside = false;
        for line in maps.lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or_default();
            if let Some((from, to)) = first.split_once('-')
                && let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16))
            {
                inside = (from..to).contains(&address);
            } else if inside && first == "AnonHugePages:" {
                return words.next().and_then(|kib| kib.parse().ok()).expect("a number");
            }
        }
        panic!("no mapping at {address:#x}");
    }

    /// A buffer is moved from its second use on, some pages a call, and keeps what is in it.
    #[test]
    fn buffers_in_use_move() {
        let size = HugePages::new().size;
        if size == 0 {
            println!("skipped: this system has no transparent huge pages, or does not let them be used");
            return;
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let Some(moved) = bytes_moved() else { return };
            // The system moves fewer pages where some are in use elsewhere at that moment, and counts buffers beside this one.
            let most = MOST_PAGES * size;
            if (moved[0], moved[1]) == (0, most) && moved[2] > most && moved[3..] == [moved[2]; 2] {
                return;
            }
            assert!(Instant::now() < deadline, "{moved:?}");
        }
    }

    /// What lies on huge pages after each of five uses of a buffer; `None` if this system moves no memory.
    fn bytes_moved() -> Option<[u64; 5]> {
        let mut pages = HugePages::new();
        let size = pages.size;
        let len = (MOST_PAGES + 4) * size;
        let bytes: Vec<u8> = (0..251).cycle().take(len as usize).collect();
        let address = bytes.as_ptr() as u64;
        let (start, end) = (address.next_multiple_of(size), (address + len) / size * size);
        // SAFETY: mapped.
        if let Err(error) = unsafe { collapse(end - size, size) } {
            println!("skipped: this system moves no memory onto huge pages: {error}");
            return None;
        }
        let already = huge_kib(address);
        let moved = [0, start + MOST_PAGES * size, end, end, end].map(|done| {
            // SAFETY: mapped.
            unsafe { pages.used([(address, len)].into_iter()) };
            assert_eq!(pages.buffers[&(address, len)].done, done);
            1024 * huge_kib(address).saturating_sub(already)
        });
        assert!(bytes.iter().zip((0..251).cycle()).all(|(byte, value)| *byte == value));
        Some(moved)
    }
}
