//! What the event loop asks of the operating system: time, readiness, and connections that carry bytes.
//!
//! The loop runs unchanged under virtual time: a test plays a [`Host`] and its [`Connection`]s, and calls
//! [`crate::Driver::turn`] whenever the host has something to do. Only TCP can be played; what needs a kernel (shared memory,
//! descriptors) cannot.

use crate::fds::Fd;
use penstock_types::{SECOND, Time};
use rustix::event::epoll;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::time::Instant;

/// A host of a played network, as the event loop on it sees it. All of it belongs to one process.
pub trait Host: Send + Sync {
    /// The time.
    fn now(&self) -> Time;
    /// The tokens of connections that are ready and that a thread watches, each with whether it can be written to; 0 stands for the listener. If there
    /// are none and `timeout` is not 0, the loop sleeps: its next turn is due after so many nanoseconds, or when something is
    /// ready.
    fn wait(&self, thread: usize, timeout: u64) -> Vec<(u64, bool)>;
    /// Begins to connect. The end is ready, for writing too, when the attempt is over: [`Connection::error`] says how it went.
    fn connect(&self, to: SocketAddr) -> Box<dyn Connection>;
    /// A thread of the loop is about to do, or has just done, what it does without the lock: others may go on now. `must`: it waits
    /// for one of them.
    fn interleave(&self, must: bool);
    /// The next connection that somebody else has made, and from where.
    fn accept(&self) -> Option<(Box<dyn Connection>, SocketAddr)>;
}

/// One end of a played connection. Dropping it closes it.
pub trait Connection: Send + Sync {
    /// From now on [`Host::wait`] tells this thread under this token when bytes have arrived, and with `write` also when there is room.
    fn watch(&self, thread: usize, token: u64, write: bool);
    /// Why connecting has failed, if it has.
    fn error(&self) -> Option<Trouble>;
    /// Takes bytes that have arrived. `Ok(0)`: the other end writes no more.
    ///
    /// # Errors
    /// Nothing is here, or the connection is gone.
    fn read(&self, slices: &mut [IoSliceMut<'_>]) -> Result<usize, Trouble>;
    /// Gives bytes away, as many as there is room for.
    ///
    /// # Errors
    /// There is no room, or the connection is gone.
    fn write(&self, slices: &[IoSlice<'_>]) -> Result<usize, Trouble>;
    /// Writes no more.
    fn finish(&self);
}

/// Why a [`Connection`] does not do as it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Not now.
    Blocked,
    /// It is gone, and what was on its way is lost.
    Reset,
    /// Nobody listens there.
    Refused,
}

/// The clock, and the sockets that the loop waits for.
pub(crate) enum System {
    /// Each thread of the loop has its own descriptor of `epoll`.
    Kernel {
        epolls: Vec<Fd>,
        epoch: Instant,
    },
    Played(Box<dyn Host>),
}

/// A connection's bytes.
pub(crate) enum Wire {
    Kernel(Fd),
    Played(Box<dyn Connection>),
}

impl System {
    pub(crate) fn kernel(threads: usize) -> Result<System, String> {
        let create = |_| epoll::create(epoll::CreateFlags::CLOEXEC).map(Fd::new);
        let epolls: Result<Vec<Fd>, Errno> = (0..threads).map(create).collect();
        Ok(System::Kernel { epolls: epolls.map_err(|e| format!("epoll_create failed: {e}"))?, epoch: Instant::now() })
    }

    pub(crate) fn now(&self) -> Time {
        match self {
            System::Kernel { epoch, .. } => Time(epoch.elapsed().as_nanos() as u64),
            System::Played(host) => host.now(),
        }
    }

    /// Watches a listener, or the descriptor that wakes a thread of the loop.
    pub(crate) fn add(&self, thread: usize, fd: impl AsFd, token: u64) -> Result<(), Errno> {
        let System::Kernel { epolls, .. } = self else { return Ok(()) };
        epoll::add(&epolls[thread], fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
    }

    /// Goes on to watch a listener, or rests.
    pub(crate) fn modify(&self, fd: impl AsFd, token: u64, flags: epoll::EventFlags) -> Result<(), Errno> {
        let System::Kernel { epolls, .. } = self else { return Ok(()) };
        epoll::modify(&epolls[0], fd, epoll::EventData::new_u64(token), flags)
    }

    /// Has a thread watch a connection.
    pub(crate) fn watch(
        &self,
        thread: usize,
        wire: &Wire,
        token: u64,
        flags: epoll::EventFlags,
        is_new: bool,
    ) -> Result<(), Errno> {
        match (self, wire) {
            (System::Kernel { epolls, .. }, Wire::Kernel(fd)) if is_new => {
                epoll::add(&epolls[thread], fd, epoll::EventData::new_u64(token), flags)
            }
            (System::Kernel { epolls, .. }, Wire::Kernel(fd)) => {
                epoll::modify(&epolls[thread], fd, epoll::EventData::new_u64(token), flags)
            }
            (_, Wire::Played(connection)) => {
                connection.watch(thread, token, flags.contains(epoll::EventFlags::OUT));
                Ok(())
            }
            (System::Played(_), Wire::Kernel(_)) => unreachable!("a played host has played connections"),
        }
    }

    /// Has a thread watch a connection no more.
    pub(crate) fn forget(&self, thread: usize, wire: &Wire) -> Result<(), Errno> {
        match (self, wire) {
            (System::Kernel { epolls, .. }, Wire::Kernel(fd)) => epoll::delete(&epolls[thread], fd),
            _ => Ok(()),
        }
    }

    /// Whether something is ready that a thread watches and has not been told.
    pub(crate) fn is_ready(&self, thread: usize) -> bool {
        let System::Kernel { epolls, .. } = self else { return false };
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&epolls[thread], &mut events[..], Some(&now)).is_ok_and(|count| count > 0)
    }

    /// Whether all of it is played, the threads too.
    pub(crate) fn is_played(&self) -> bool {
        matches!(self, System::Played(_))
    }

    /// The lock is free: where threads are played, another one may go on, or (`must`) does.
    pub(crate) fn interleave(&self, must: bool) {
        if let System::Played(host) = self {
            host.interleave(must);
        }
    }

    /// Waits for at most `nanos`, or for events, of which `events` has room for `room`. `listener` is the token of the first.
    pub(crate) fn wait(
        &self,
        thread: usize,
        events: &mut Vec<epoll::Event>,
        room: usize,
        nanos: u64,
        listener: u64,
    ) -> Result<(), Errno> {
        match self {
            System::Kernel { epolls, .. } => {
                let timeout =
                    rustix::time::Timespec { tv_sec: (nanos / SECOND) as i64, tv_nsec: (nanos % SECOND) as i64 };
                events.reserve(room);
                epoll::wait(&epolls[thread], rustix::buffer::spare_capacity(events), Some(&timeout)).map(drop)
            }
            System::Played(host) => {
                events.extend(host.wait(thread, nanos).into_iter().map(|(token, write)| {
                    let flags = if write { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
                    let token = if token == 0 { listener } else { token };
                    epoll::Event { flags: flags | epoll::EventFlags::IN, data: epoll::EventData::new_u64(token) }
                }));
                Ok(())
            }
        }
    }
}

impl Wire {
    /// The descriptor, where a kernel has one for it.
    pub(crate) fn descriptor(&self) -> Option<&Fd> {
        match self {
            Wire::Kernel(fd) => Some(fd),
            Wire::Played(_) => None,
        }
    }

    /// Whether connecting has failed.
    pub(crate) fn error(&self) -> Result<(), Errno> {
        match self {
            Wire::Kernel(fd) => rustix::net::sockopt::socket_error(fd).and_then(|error| error),
            Wire::Played(connection) => connection.error().map_or(Ok(()), |trouble| Err(trouble.into())),
        }
    }

    pub(crate) fn read(
        &self,
        slices: &mut [IoSliceMut<'_>],
        local: bool,
        descriptors: &mut Vec<Fd>,
    ) -> Result<usize, Errno> {
        match self {
            Wire::Kernel(fd) => read(fd, slices, local, descriptors),
            Wire::Played(connection) => connection.read(slices).map_err(Errno::from),
        }
    }

    pub(crate) fn write(&self, slices: &[IoSlice<'_>], descriptor: Option<&Fd>) -> Result<usize, Errno> {
        match self {
            Wire::Kernel(fd) => write(fd, slices, descriptor),
            Wire::Played(connection) => connection.write(slices).map_err(Errno::from),
        }
    }

    /// Writes no more.
    pub(crate) fn finish(&self) {
        match self {
            Wire::Kernel(fd) => drop(rustix::net::shutdown(fd, rustix::net::Shutdown::Write)),
            Wire::Played(connection) => connection.finish(),
        }
    }
}

/// Writes what the kernel takes; a descriptor goes along with the first byte. A peer that is gone is an error and no SIGPIPE: the
/// program around us may have set that back to its default, which is to die.
fn write(fd: impl AsFd, slices: &[IoSlice<'_>], descriptor: Option<&Fd>) -> Result<usize, Errno> {
    let descriptors = descriptor.map(AsFd::as_fd);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if descriptors.is_some() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(descriptors.as_slice()));
        debug_assert!(fits, "the space is for one");
    }
    rustix::net::sendmsg(fd, slices, &mut ancillary, SendFlags::NOSIGNAL)
}

/// Reads what there is, from a local socket with the descriptors that come along.
fn read(fd: impl AsFd, slices: &mut [IoSliceMut<'_>], local: bool, descriptors: &mut Vec<Fd>) -> Result<usize, Errno> {
    if !local {
        return rustix::io::readv(fd, slices);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(fd, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights.map(Fd::new));
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // The kernel keeps back descriptors that this process has no numbers for, and they cannot be had again. What was read
        // is lost with them, but not without a word: the socket closes, and the groups of both ends fail with this reason.
        return Err(Errno::MFILE);
    }
    Ok(received.bytes)
}

impl From<Trouble> for Errno {
    fn from(trouble: Trouble) -> Errno {
        match trouble {
            Trouble::Blocked => Errno::AGAIN,
            Trouble::Reset => Errno::CONNRESET,
            Trouble::Refused => Errno::CONNREFUSED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsRawFd;

    /// A descriptor that a local socket has brought is closed in a forked child, as the socket itself is; one that is
    /// kept back by the kernel ends the connection.
    #[test]
    fn a_forked_child_keeps_nothing_that_was_passed() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        let reader = Fd::new(reader);
        assert_eq!(write(&ours, &[IoSlice::new(b"x")], Some(&reader)), Ok(1));
        let (mut byte, mut passed) = ([0], Vec::new());
        assert_eq!(read(&theirs, &mut [IoSliceMut::new(&mut byte)], true, &mut passed), Ok(1));
        let [passed] = &passed[..] else { panic!("{passed:?}") };
        let number = passed.as_fd().as_raw_fd();
        // SAFETY: the child makes two system calls and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::_exit(libc::c_int::from(libc::fcntl(number, libc::F_GETFD) != -1)) };
        }
        let mut status = 0;
        // SAFETY: our own child, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child has it");

        let many = [reader.as_fd(); 20];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&many)));
        rustix::net::sendmsg(&ours, &[IoSlice::new(b"x")], &mut ancillary, SendFlags::NOSIGNAL).expect("sent");
        let mut passed = Vec::new();
        assert_eq!(read(&theirs, &mut [IoSliceMut::new(&mut byte)], true, &mut passed), Err(Errno::MFILE));
    }

    /// A peer that is gone is an error for whoever writes to it, also where SIGPIPE ends the process.
    #[test]
    fn a_peer_that_is_gone_ends_no_process() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        drop(theirs);
        // SAFETY: the child sets a handler, makes a system call and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            let is_error = write(&ours, &[IoSlice::new(b"x")], None) == Err(Errno::PIPE);
            // SAFETY: as above.
            unsafe { libc::_exit(libc::c_int::from(!is_error)) };
        }
        let mut status = 0;
        // SAFETY: our own child, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "it has died of a signal, or the error is another");
    }
}
