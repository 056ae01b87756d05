//! Whether the process at the other end of a local socket is the one that it claims to be, and can be read.

use super::Driver;
use crate::contact::Contact;
use crate::memory::MemoryEpoch;
use crate::socket::Socket;
use penstock_types::PeerId;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use std::io;

impl Driver {
    /// Whether the result of [`read_memory_epoch`] means that this process may read the peer's memory; warns if not.
    pub(super) fn can_read(&self, found: io::Result<Option<bool>>, contact: &Contact) -> bool {
        let why = match found {
            Ok(Some(same)) => return same,
            Ok(None) => "it is in another PID namespace".to_owned(),
            Err(error) => {
                self.yama.warn(&error, &contact.describe());
                error.to_string()
            }
        };
        let who = contact.describe();
        log::info!("penstock: cannot read the memory of {who} ({why}): bytes go through the socket instead");
        false
    }

    pub(super) fn can_read_back(&self, socket: &Socket, peer: PeerId) -> bool {
        let Some(Ok(fd)) = socket.wire.descriptor().map(|fd| fd.as_fd().try_clone_to_owned()) else { return false };
        let contact = &self.connections[peer as usize].contact;
        contact.memory_epoch != 0 && self.can_read(read_memory_epoch(&fd, contact), contact)
    }
}

/// Whether the process at the other end of a local socket has its memory epoch where its contact says; `None`: that process is
/// in another PID namespace.
pub(super) fn read_memory_epoch(fd: &OwnedFd, contact: &Contact) -> io::Result<Option<bool>> {
    process_at(fd).map(|pid| MemoryEpoch::is_of(pid, contact.memory_epoch, &contact.node)).transpose()
}

/// The process at the other end of a local socket, as our PID namespace numbers it.
pub(super) fn process_at(fd: impl AsFd) -> Option<u32> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of_val(&credentials) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: the kernel writes `length` bytes at most.
    let rc = unsafe {
        libc::getsockopt(fd.as_fd().as_raw_fd(), level, name, (&raw mut credentials).cast(), &raw mut length)
    };
    if rc == 0 { visible_process(&credentials) } else { None }
}

/// The kernel reports 0 for a process that is not visible in our PID namespace (rustix assumes that this is impossible).
pub(super) fn visible_process(credentials: &libc::ucred) -> Option<u32> {
    u32::try_from(credentials.pid).ok().filter(|pid| *pid != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The process behind a socket is known, unless it is in a PID namespace that ours does not see.
    #[test]
    fn the_process_behind_a_socket() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        assert_eq!(process_at(&ours), Some(std::process::id()));
        assert_eq!(process_at(std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket")), None);
        for (pid, expected) in [(0, None), (-1, None), (7, Some(7))] {
            assert_eq!(visible_process(&libc::ucred { pid, uid: 0, gid: 0 }), expected);
        }
    }
}
