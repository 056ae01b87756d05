//! Memory of other processes on the same host: read by the kernel, or mapped.

use crate::fds::{Fd, forked};
use penstock_stream::handshake::NodeKey;
use rustix::fd::{AsFd, AsRawFd};
use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Once};

/// A counter in a process's memory, for the processes that read this memory. It says whose memory it is, and whether
/// references are still valid.
///
/// A process whose group fails reuses its buffers without asking the readers. It increments the epoch first. A reader checks
/// the epoch after it has copied the bytes: if the epoch is the same, the bytes were the message's.
#[derive(Debug)]
#[repr(C)]
pub struct MemoryEpoch {
    node: NodeKey,
    epoch: AtomicU64,
}

impl MemoryEpoch {
    /// A counter for the process with this key.
    #[must_use]
    pub fn new(node: NodeKey) -> MemoryEpoch {
        MemoryEpoch { node, epoch: AtomicU64::new(0) }
    }

    /// Its address, for [`crate::Contact::memory_epoch`].
    #[must_use]
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    /// The present epoch, which references of this moment carry.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Invalidates all references given so far. Only one thread may call it.
    pub fn turn(&self) {
        self.epoch.store(self.epoch() + 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether process `pid` lets this one read its memory, and has the key `node`.
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

/// Memory that this process shares: a sealed memory file. Its first page belongs to the engine, the user's bytes follow.
#[derive(Debug)]
pub struct Region {
    file: Fd,
    /// The address at which the user has mapped the bytes.
    address: u64,
    len: u64,
    header: Mapped,
}

impl Region {
    /// Registers a memory file of one page and `len` bytes, whose bytes the user has mapped at `address`.
    ///
    /// # Errors
    /// The file is shorter, or could become so, or cannot be mapped.
    pub fn new(file: Fd, address: u64, len: u64) -> io::Result<Region> {
        check_file(&file, len)?;
        let header = Mapped::new(&file, page_bytes(), ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Region { file, address, len, header })
    }

    /// The address of the user's bytes.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes that references may name.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The offset of an address of this process, if the region has `len` bytes from there.
    #[must_use]
    pub fn offset(&self, address: u64, len: u64) -> Option<u64> {
        let offset = address.checked_sub(self.address)?;
        (offset.checked_add(len)? <= self.len()).then_some(offset)
    }

    /// A read-only descriptor for peers, for [`Mapping::new`].
    ///
    /// # Errors
    /// The system's; without `/proc` there is no such descriptor.
    pub fn descriptor(&self) -> io::Result<Fd> {
        let path = format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd());
        Ok(Fd::new(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// Publishes the present epoch, see [`MemoryEpoch`].
    pub fn set_epoch(&self, epoch: u64) {
        self.header.epoch().store(epoch, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// A peer's [`Region`], read only.
#[derive(Debug)]
pub struct Mapping {
    len: u64,
    whole: Whole,
}

/// How the file of a peer's [`Region`] is read.
#[derive(Debug)]
enum Whole {
    Mapped(Mapped),
    /// By system calls: this process may not map any more.
    File(Fd),
}

impl Mapping {
    /// Maps a descriptor that a peer has passed for a region of `len` bytes. If this process has no room for another mapping
    /// (a limit on its address space, or on the number of mappings), the bytes are read from the file instead.
    ///
    /// # Errors
    /// The file is shorter, or could become so (to touch missing bytes would kill this process), or may not be read.
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

    /// Whether the bytes are mapped, and need not be copied.
    #[cfg(test)]
    fn is_mapped(&self) -> bool {
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
pub(crate) struct Mapped {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: an address range that stays mapped until the drop. What it holds is accessed as other processes' memory is: raw
// bytes that their owner does not change, and an atomic counter.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(file: &Fd, bytes: usize, protection: ProtFlags) -> Result<Mapped, Errno> {
        // SAFETY: a new mapping where the kernel chooses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0)? };
        // Without this a forked child would hold the memory for as long as it lives; if the kernel refuses, it does.
        // SAFETY: our own mapping, which stays as it is in this process.
        let _ = unsafe { rustix::mm::madvise(base, bytes, Advice::LinuxDontFork) };
        Ok(Mapped { base: base.cast(), bytes })
    }

    /// A page that others write, too.
    pub(crate) fn shared(file: &Fd, bytes: usize) -> Result<Mapped, Errno> {
        Mapped::new(file, bytes, ProtFlags::READ | ProtFlags::WRITE)
    }

    pub(crate) fn epoch(&self) -> &AtomicU64 {
        // SAFETY: the first page is mapped; the counter lies at its start, which is aligned.
        unsafe { AtomicU64::from_ptr(self.base.cast()) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if forked() {
            // The child has no such mapping, and the addresses may be in use for something else.
            return;
        }
        // SAFETY: our own mapping; every reader holds a reference to it.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}

/// Checks that a file holds a page and `len` bytes, and cannot shrink.
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
        /// Their address in that process.
        address: u64,
        /// The address of its [`MemoryEpoch`].
        memory_epoch: u64,
        /// The epoch of the reference.
        epoch: u64,
    },
    /// In memory that it shares.
    Mapped {
        /// The mapping.
        mapping: Arc<Mapping>,
        /// Their offset in it.
        offset: u64,
        /// The epoch of the reference.
        epoch: u64,
    },
}

impl Remote {
    /// `len` bytes of shared memory from `offset`. `None`: the region is too short.
    #[must_use]
    pub fn mapped(mapping: &Arc<Mapping>, offset: u64, len: u64, epoch: u64) -> Option<Remote> {
        let fits = offset.checked_add(len)? <= mapping.len;
        fits.then(|| Remote::Mapped { mapping: mapping.clone(), offset, epoch })
    }

    /// The address of the bytes, if they are mapped here.
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

    /// Copies `len` bytes from `offset` to `dst`: one copy, by the kernel if the memory is not mapped.
    ///
    /// # Errors
    /// The system's error: `EPERM` if the kernel denies access (Yama, another user, a container without `CAP_SYS_PTRACE`),
    /// `ESRCH` if the process is gone, `EFAULT` if the memory is.
    ///
    /// # Safety
    /// `dst` must be valid for writes of `len` bytes, and the source must have that many from `offset`.
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

    /// Whether all bytes that were read before this call are the message's. If not, the reference was no longer valid.
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

/// Bytes before the user's in a region's file: a page of the system, so that the user's bytes start at a page.
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

/// Repeats a system call until the buffer is full. The call gets the bytes done so far and the rest of the buffer.
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

    /// A memory epoch identifies its owner, and references from before an increment are invalid for good.
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

    /// A file that is too short, or could become so, is refused: to touch missing bytes would kill the process.
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
