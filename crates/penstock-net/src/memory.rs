//! Reading the memory of another process on the same host.

use penstock_protocol::handshake::NodeKey;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a process shows to those that can read its memory: who it is, and whether what it gave by reference still holds.
///
/// A process whose group fails takes its buffers back without asking those that read them. It turns the epoch before it
/// does, and a reader looks at the epoch after the bytes: unchanged, they were the ones that were meant.
#[derive(Debug)]
#[repr(C)]
pub struct Landmark {
    node: NodeKey,
    epoch: AtomicU64,
}

impl Landmark {
    /// Of the process that `node` names.
    #[must_use]
    pub fn new(node: NodeKey) -> Landmark {
        Landmark { node, epoch: AtomicU64::new(0) }
    }

    /// Where it lies, for [`crate::Contact::landmark`].
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
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Whether process `pid` lets us read its memory and is the one that `node` names.
    ///
    /// # Errors
    /// The system's, see [`Remote::read`].
    pub fn is_of(pid: u32, landmark: u64, node: &NodeKey) -> io::Result<bool> {
        let mut found = NodeKey::default();
        // SAFETY: `found` has the length of a key.
        unsafe { read_process(pid, landmark, found.as_mut_ptr(), found.len())? };
        Ok(found == *node)
    }
}

/// Bytes in the memory of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The process, as our PID namespace numbers it.
    pub pid: u32,
    /// Where they are.
    pub address: u64,
    /// Where its [`Landmark`] is.
    pub landmark: u64,
    /// The epoch that it gave them in.
    pub epoch: u64,
}

impl Remote {
    /// Copies `len` bytes from `offset` on to `dst`: one copy, done by the kernel.
    ///
    /// # Errors
    /// The system's error: `EPERM` when the kernel does not let us (Yama, another user, a container without
    /// `CAP_SYS_PTRACE`), `ESRCH` when the process is gone, `EFAULT` when the memory is.
    ///
    /// # Safety
    /// `dst` must be valid for writes of `len` bytes.
    pub unsafe fn read(&self, offset: u64, dst: *mut u8, len: usize) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { read_process(self.pid, self.address + offset, dst, len) }
    }

    /// Whether everything that was read before this call is what the owner meant. If not, only it can tell.
    ///
    /// # Errors
    /// As [`Remote::read`].
    pub fn is_certain(&self) -> io::Result<bool> {
        let mut epoch = [0; 8];
        let at = self.landmark + std::mem::offset_of!(Landmark, epoch) as u64;
        // SAFETY: `epoch` has that length.
        unsafe { read_process(self.pid, at, epoch.as_mut_ptr(), epoch.len())? };
        Ok(u64::from_ne_bytes(epoch) == self.epoch)
    }
}

/// `process_vm_readv`, all of it.
///
/// # Safety
/// `dst` must be valid for writes of `len` bytes.
unsafe fn read_process(pid: u32, address: u64, dst: *mut u8, len: usize) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let local = libc::iovec { iov_base: dst.wrapping_add(done).cast(), iov_len: len - done };
        let remote = libc::iovec { iov_base: (address as usize + done) as *mut libc::c_void, iov_len: len - done };
        // SAFETY: `local` lies in the caller's buffer; the kernel checks `remote`.
        let count = unsafe { libc::process_vm_readv(pid as libc::pid_t, &local, 1, &remote, 1, 0) };
        match count {
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

    /// A process can read itself, and an address that nobody owns is an error, not a crash.
    #[test]
    fn reads_what_is_there() {
        let theirs = [1u8, 2, 3, 4, 5];
        let mut ours = [0u8; 4];
        let remote = Remote { pid: std::process::id(), address: theirs.as_ptr() as u64, landmark: 8, epoch: 0 };
        // SAFETY: `ours` is 4 bytes.
        unsafe { remote.read(1, ours.as_mut_ptr(), 4) }.expect("own memory");
        assert_eq!(ours, theirs[1..]);
        let error = remote.is_certain().expect_err("unmapped");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }

    /// A landmark tells who owns it, and what was given before it turned is doubtful for good.
    #[test]
    fn a_turned_landmark_casts_doubt() {
        let landmark = Landmark::new([7; 16]);
        let pid = std::process::id();
        assert!(Landmark::is_of(pid, landmark.address(), &[7; 16]).expect("own memory"));
        assert!(!Landmark::is_of(pid, landmark.address(), &[8; 16]).expect("own memory"));
        let given = |epoch| Remote { pid, address: 8, landmark: landmark.address(), epoch };
        let before = given(landmark.epoch());
        assert!(before.is_certain().expect("own memory"));
        landmark.turn();
        assert!(!before.is_certain().expect("own memory"));
        assert!(given(landmark.epoch()).is_certain().expect("own memory"));
    }
}
