//! Memory of other processes on the same host: read through the kernel, or mapped.

use crate::fds::{Fd, forked};
use penstock_stream::handshake::NodeKey;
use rustix::fd::{AsFd, AsRawFd};
use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Once};

/// What a process shows to those that can read its memory: who it is, and whether what it gave by reference still holds.
///
/// A process whose group fails takes its buffers back without asking those that read them. It turns the epoch before it
/// does, and a reader looks at the epoch after the bytes: unchanged, they were the ones that were meant.
#[derive(Debug)]
#[repr(C)]
pub struct MemoryEpoch {
    node: NodeKey,
    epoch: AtomicU64,
}

impl MemoryEpoch {
    /// Of the process that `node` names.
    #[must_use]
    pub fn new(node: NodeKey) -> MemoryEpoch {
        MemoryEpoch { node, epoch: AtomicU64::new(0) }
    }

    /// Where it lies, for [`crate::Contact::memory_epoch`].
    #[must_use]
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    /// The present epoch: what references are good for.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Casts doubt on all references given so far. Only one thread may call it.
    pub fn turn(&self) {
        self.epoch.store(self.epoch() + 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether process `pid` lets us read its memory and is the one that `node` names.
    ///
    /// # Errors
    /// The system's, see [`Remote::read`].
    pub fn is_of(pid: u32, memory_epoch: u64, node: &NodeKey) -> io::Result<bool> {
        let mut found = NodeKey::default();
        // SAFETY: `found` has the length of a key.
        unsafe { read_process(pid, memory_epoch, found.as_mut_ptr(), found.len())? };
        Ok(found == *node)
    }
}

/// Memory that this process shares: a sealed memory file whose first page belongs to the engine, and the user's bytes
/// behind it.
#[derive(Debug)]
pub struct Region {
    file: Fd,
    /// Where the user has its bytes.
    address: u64,
    len: u64,
    header: Mapped,
}

impl Region {
    /// Takes a memory file of one page and `len` bytes; the user has those mapped at `address`.
    ///
    /// # Errors
    /// A file that is shorter, or that could become so, or that cannot be mapped.
    pub fn new(file: Fd, address: u64, len: u64) -> io::Result<Region> {
        check_file(&file, len)?;
        let header = Mapped::new(&file, page_bytes(), ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Region { file, address, len, header })
    }

    /// Where the user has them.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes that references may name.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The offset of an address of this process, if the region holds `len` bytes from there on.
    #[must_use]
    pub fn offset(&self, address: u64, len: u64) -> Option<u64> {
        let offset = address.checked_sub(self.address)?;
        (offset.checked_add(len)? <= self.len()).then_some(offset)
    }

    /// For peers: what [`Mapping::new`] takes, to read only.
    ///
    /// # Errors
    /// The system's; without `/proc` there is no such descriptor.
    pub fn descriptor(&self) -> io::Result<Fd> {
        let path = format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd());
        Ok(Fd::new(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// Says which epoch it is, see [`MemoryEpoch`].
    pub fn set_epoch(&self, epoch: u64) {
        self.header.epoch().store(epoch, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// A peer's [`Region`], to read.
#[derive(Debug)]
pub struct Mapping {
    len: u64,
    whole: Whole,
}

/// The file of a peer's [`Region`].
#[derive(Debug)]
enum Whole {
    Mapped(Mapped),
    /// This process may not map any more: the kernel copies from the file.
    File(Fd),
}

impl Mapping {
    /// Maps what a peer has passed, which it says to hold `len` bytes for us. Where this process has no room for
    /// another mapping (a limit on its address space, or on their number), the bytes are read from the file instead.
    ///
    /// # Errors
    /// A file that is shorter, or that could become so (touching what is gone would kill us), or that we may not read.
    pub fn new(file: Fd, len: u64) -> io::Result<Mapping> {
        check_file(&file, len)?;
        let bytes = usize::try_from(len).map_err(io::Error::other)? + page_bytes();
        let whole = match Mapped::new(&file, bytes, ProtFlags::READ) {
            Ok(mapped) => Whole::Mapped(mapped),
            Err(error @ (Errno::NOMEM | Errno::AGAIN)) => {
                static TOLD: Once = Once::new();
                TOLD.call_once(|| {
                    log::warn!(
                        "penstock: cannot map {bytes} bytes that a rank of this host shares ({error}): they are copied. \
                         Raise `ulimit -v` or vm.max_map_count"
                    );
                });
                Whole::File(file)
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Mapping { len, whole })
    }

    /// Whether it can be looked at, and need not be copied.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        matches!(self.whole, Whole::Mapped(_))
    }

    fn epoch(&self) -> io::Result<u64> {
        match &self.whole {
            Whole::Mapped(mapped) => Ok(mapped.epoch().load(Ordering::SeqCst)),
            Whole::File(file) => {
                let mut now = [0; 8];
                // SAFETY: `now` has that length.
                unsafe { read_file(file, 0, now.as_mut_ptr(), now.len())? };
                Ok(u64::from_ne_bytes(now))
            }
        }
    }
}

/// A mapping of a memory file from its start.
#[derive(Debug)]
struct Mapped {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: an address range that stays mapped until the drop. What lies in it is read and written as other processes'
// memory is: raw bytes whose owner keeps them still, and an atomic counter.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(file: &Fd, bytes: usize, protection: ProtFlags) -> Result<Mapped, Errno> {
        // SAFETY: a new mapping where the kernel chooses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0)? };
        // A forked child would keep the memory for as long as it lives. Where that is refused, it does.
        // SAFETY: our own mapping, which stays as it is in this process.
        let _ = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxDontFork) };
        Ok(Mapped { base: base.cast(), bytes })
    }

    fn epoch(&self) -> &AtomicU64 {
        // SAFETY: the first page is mapped; the counter lies at its start, where page alignment puts it right.
        unsafe { AtomicU64::from_ptr(self.base.cast()) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if forked() {
            // The child does not have it, and the addresses may belong to somebody else by now.
            return;
        }
        // SAFETY: our own mapping; whoever reads it holds it.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}

/// Whether a file holds a page and `len` bytes, for good.
fn check_file(file: &Fd, len: u64) -> io::Result<()> {
    let bytes = rustix::fs::fstat(file)?.st_size as u64;
    if bytes < len.saturating_add(page_bytes() as u64) {
        return Err(io::Error::other(format!("shared memory of {bytes} bytes, where {len} and a page are announced")));
    }
    if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return Err(io::Error::other("shared memory that its owner could take back (it is not sealed)"));
    }
    Ok(())
}

/// Bytes that belong to another process.
#[derive(Clone, Debug)]
pub enum Remote {
    /// In its private memory.
    Process {
        /// The process, as our PID namespace numbers it.
        pid: u32,
        /// Where they are.
        address: u64,
        /// Where its [`MemoryEpoch`] is.
        memory_epoch: u64,
        /// The epoch that it gave them in.
        epoch: u64,
    },
    /// In memory that it shares.
    Mapped {
        /// That memory.
        mapping: Arc<Mapping>,
        /// Where they start in it.
        offset: u64,
        /// The epoch that it gave them in.
        epoch: u64,
    },
}

impl Remote {
    /// `len` bytes of shared memory from `offset` on. `None`: they are not there.
    #[must_use]
    pub fn mapped(mapping: &Arc<Mapping>, offset: u64, len: u64, epoch: u64) -> Option<Remote> {
        let fits = offset.checked_add(len)? <= mapping.len;
        fits.then(|| Remote::Mapped { mapping: mapping.clone(), offset, epoch })
    }

    /// Where the bytes are, if this process can look at them.
    #[must_use]
    pub fn pointer(&self) -> Option<*const u8> {
        match self {
            Remote::Mapped { mapping, offset, .. } => match &mapping.whole {
                Whole::Mapped(whole) => Some(whole.base.wrapping_add(page_bytes() + *offset as usize).cast_const()),
                Whole::File(_) => None,
            },
            Remote::Process { .. } => None,
        }
    }

    /// Copies `len` bytes from `offset` on to `dst`: one copy, by the kernel where memory is not mapped.
    ///
    /// # Errors
    /// The system's error: `EPERM` when the kernel does not let us (Yama, another user, a container without
    /// `CAP_SYS_PTRACE`), `ESRCH` when the process is gone, `EFAULT` when the memory is.
    ///
    /// # Safety
    /// `dst` must be valid for writes of `len` bytes, and so many must be there from `offset` on.
    pub unsafe fn read(&self, offset: u64, dst: *mut u8, len: usize) -> io::Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Remote::Process { pid, address, .. } => unsafe { read_process(*pid, address + offset, dst, len) },
            Remote::Mapped { mapping, offset: start, .. } => {
                let place = page_bytes() as u64 + start + offset;
                match &mapping.whole {
                    Whole::Mapped(whole) => {
                        // SAFETY: the caller's promise; `mapped` has checked the range.
                        unsafe { std::ptr::copy_nonoverlapping(whole.base.wrapping_add(place as usize), dst, len) };
                        Ok(())
                    }
                    // SAFETY: the caller's promise.
                    Whole::File(file) => unsafe { read_file(file, place, dst, len) },
                }
            }
        }
    }

    /// Whether everything that was read before this call is what the owner meant. If not, only it can tell.
    ///
    /// # Errors
    /// As [`Remote::read`].
    pub fn is_certain(&self) -> io::Result<bool> {
        match self {
            Remote::Process { pid, memory_epoch, epoch, .. } => {
                let mut now = [0; 8];
                let at = memory_epoch + std::mem::offset_of!(MemoryEpoch, epoch) as u64;
                // SAFETY: `now` has that length.
                unsafe { read_process(*pid, at, now.as_mut_ptr(), now.len())? };
                Ok(u64::from_ne_bytes(now) == *epoch)
            }
            Remote::Mapped { mapping, epoch, .. } => {
                fence(Ordering::SeqCst);
                Ok(mapping.epoch()? == *epoch)
            }
        }
    }
}

/// What of a region's file comes before the user's bytes: one of the system's pages, so that those start at a page.
#[must_use]
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// `process_vm_readv`, all of it.
///
/// # Safety
/// `dst` must be valid for writes of `len` bytes.
unsafe fn read_process(pid: u32, address: u64, dst: *mut u8, len: usize) -> io::Result<()> {
    read_all(dst, len, |done, dst, len| {
        let local = libc::iovec { iov_base: dst.cast(), iov_len: len };
        let remote = libc::iovec { iov_base: (address as usize + done) as *mut libc::c_void, iov_len: len };
        // SAFETY: `local` lies in the caller's buffer; the kernel checks `remote`.
        unsafe { libc::process_vm_readv(pid as libc::pid_t, &local, 1, &remote, 1, 0) }
    })
}

/// `pread`, all of it.
///
/// # Safety
/// `dst` must be valid for writes of `len` bytes.
unsafe fn read_file(file: &Fd, offset: u64, dst: *mut u8, len: usize) -> io::Result<()> {
    read_all(dst, len, |done, dst, len| {
        // SAFETY: `dst` lies in the caller's buffer.
        unsafe { libc::pread64(file.as_fd().as_raw_fd(), dst.cast(), len, (offset + done as u64) as libc::off64_t) }
    })
}

/// Repeats a system call that is given how much is done, and the rest of the buffer, until the buffer is full.
fn read_all(dst: *mut u8, len: usize, call: impl Fn(usize, *mut u8, usize) -> isize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        match call(done, dst.wrapping_add(done), len - done) {
            -1 => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => done += count as usize,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(address: u64, memory_epoch: u64, epoch: u64) -> Remote {
        Remote::Process { pid: std::process::id(), address, memory_epoch, epoch }
    }

    /// A process can read itself, and an address that nobody owns is an error, not a crash.
    #[test]
    fn reads_what_is_there() {
        let theirs = [1u8, 2, 3, 4, 5];
        let mut ours = [0u8; 4];
        let remote = process(theirs.as_ptr() as u64, 8, 0);
        // SAFETY: `ours` is 4 bytes.
        unsafe { remote.read(1, ours.as_mut_ptr(), 4) }.expect("own memory");
        assert_eq!(ours, theirs[1..]);
        let error = remote.is_certain().expect_err("unmapped");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }

    /// A memory epoch tells who owns it, and what was given before it turned is doubtful for good.
    #[test]
    fn an_epoch_that_has_turned_casts_doubt() {
        let memory_epoch = MemoryEpoch::new([7; 16]);
        let pid = std::process::id();
        assert!(MemoryEpoch::is_of(pid, memory_epoch.address(), &[7; 16]).expect("own memory"));
        assert!(!MemoryEpoch::is_of(pid, memory_epoch.address(), &[8; 16]).expect("own memory"));
        let before = process(8, memory_epoch.address(), memory_epoch.epoch());
        assert!(before.is_certain().expect("own memory"));
        memory_epoch.turn();
        assert!(!before.is_certain().expect("own memory"));
        assert!(process(8, memory_epoch.address(), memory_epoch.epoch()).is_certain().expect("own memory"));
    }

    fn memory_file(bytes: u64, seals: SealFlags) -> Fd {
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("test", flags).expect("a memory file");
        rustix::fs::ftruncate(&file, bytes).expect("its length");
        rustix::fs::fcntl_add_seals(&file, seals).expect("its seals");
        Fd::new(file)
    }

    /// What the owner writes is what a peer sees, whether it can map the memory or only read its file; beyond its end
    /// nothing can be named; an epoch that has turned shows too.
    #[test]
    fn shared_memory_shows_what_its_owner_writes() {
        let page = page_bytes();
        let file = memory_file(3 * page as u64, SealFlags::SHRINK | SealFlags::GROW);
        let user = Mapped::new(&file, 3 * page, ProtFlags::READ | ProtFlags::WRITE).expect("the user's own");
        let address = user.base as u64 + page as u64;
        let region = Region::new(file, address, 2 * page as u64).expect("a region");
        assert_eq!(region.offset(address + 5, 10), Some(5));
        assert_eq!(region.offset(address - 1, 1), None);
        assert_eq!(region.offset(address + 1, 2 * page as u64), None);
        // SAFETY: inside the user's mapping.
        unsafe { user.base.add(page + 5).write(77) };

        let passed = || region.descriptor().expect("one");
        assert!(Mapped::new(&passed(), page, ProtFlags::WRITE).is_err(), "peers only read");
        let mapped = Mapping::new(passed(), region.len()).expect("a mapping");
        assert!(mapped.is_mapped());
        let unmapped = Mapping { len: region.len(), whole: Whole::File(passed()) };
        for mapping in [mapped, unmapped].map(Arc::new) {
            region.set_epoch(4);
            assert!(Remote::mapped(&mapping, 2 * page as u64 - 1, 2, 4).is_none());
            assert!(Remote::mapped(&mapping, u64::MAX, 2, 4).is_none());
            let remote = Remote::mapped(&mapping, 4, 8, 4).expect("inside");
            assert_eq!(remote.pointer().is_some(), mapping.is_mapped());
            let mut ours = [0; 6];
            // SAFETY: `ours` is 6 bytes.
            unsafe { remote.read(1, ours.as_mut_ptr(), 6) }.expect("shared");
            assert_eq!(ours, [77, 0, 0, 0, 0, 0]);
            assert!(remote.is_certain().expect("shared"));
            region.set_epoch(5);
            assert!(!remote.is_certain().expect("shared"));
        }
    }

    /// A file that is too short, or could become so, would kill whoever touches what is missing.
    #[test]
    fn memory_that_could_vanish_is_refused() {
        let page = page_bytes() as u64;
        let error = Mapping::new(memory_file(page + 99, SealFlags::SHRINK), 100).expect_err("short");
        assert!(error.to_string().contains("announced"), "{error}");
        let error = Mapping::new(memory_file(2 * page, SealFlags::GROW), 100).expect_err("not sealed");
        assert!(error.to_string().contains("sealed"), "{error}");
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        assert!(Mapping::new(Fd::new(reader), 0).is_err());
    }
}
