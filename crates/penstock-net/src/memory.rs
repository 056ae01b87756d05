//! Reading the memory of another process on the same host.

use std::io;

/// Copies `len` bytes at `address` of process `pid` to `dst`: one copy, done by the kernel.
///
/// # Errors
/// The system's error: `EPERM` when the kernel does not let us (Yama, another user, a container without
/// `CAP_SYS_PTRACE`), `ESRCH` when the process is gone, `EFAULT` when the memory is.
///
/// # Safety
/// `dst` must be valid for writes of `len` bytes.
pub unsafe fn read_process(pid: u32, address: u64, dst: *mut u8, len: usize) -> io::Result<()> {
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
        let mut ours = [0u8; 5];
        // SAFETY: `ours` is 5 bytes.
        unsafe { read_process(std::process::id(), theirs.as_ptr() as u64, ours.as_mut_ptr(), 5) }.expect("own memory");
        assert_eq!(ours, theirs);
        // SAFETY: as above.
        let error = unsafe { read_process(std::process::id(), 8, ours.as_mut_ptr(), 5) }.expect_err("unmapped");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
