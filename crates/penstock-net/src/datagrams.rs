//! UDP in trains.
//!
//! A *train* is a run of datagrams from one address, or to one, all of one length but the last, which may be shorter. The
//! kernel takes and gives a train in one piece (GSO and GRO, "segmentation offload"), so it costs as much as one datagram, a
//! few microseconds, whether it holds one or 64.
//!
//! ```text
//!   receive ──▶ train ──▶ datagram, datagram, ...        queue(to, header, payload) ──▶ open train of `to`
//!                 │                                          │ full, or a shorter one
//!                 └── relay: the received bytes, to many     ▼
//!                                                        the kernel; what it does not take now waits ──▶ flush
//! ```
//! Nothing here drops a datagram for which the socket's buffer has no room: it waits, and [`Datagrams::is_blocked`] says so. A
//! caller that then stops receiving until [`Datagrams::flush`] succeeds keeps the memory bounded by one batch.
//!
//! Why `quinn-udp`? It knows the control messages and their old kernels. Rivals: `socket2` and `rustix` (neither has batched
//! calls), `tokio` (no offloads). Without offloads we call `sendmmsg` ourselves, since `quinn-udp` sends one by one.

use crate::fds::Fd;
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A non-blocking UDP socket, and the datagrams that wait to be sent through it. A forked child closes it.
#[derive(Debug)]
pub struct Datagrams {
    socket: Fd,
    state: UdpSocketState,
    local: SocketAddr,
    offloads: Offloads,
    /// Pieces of `piece` bytes, one a train.
    inbox: Vec<u8>,
    piece: usize,
    queue: Queue,
    counters: DatagramCounters,
}

/// Counters of one socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatagramCounters {
    /// Datagrams that came.
    pub received: u64,
    /// Trains that came.
    pub received_trains: u64,
    /// Bytes that came.
    pub received_bytes: u64,
    /// Datagrams that left.
    pub sent: u64,
    /// System calls that sent datagrams.
    pub sent_calls: u64,
    /// Bytes that left.
    pub sent_bytes: u64,
    /// Datagrams that the kernel refused for another reason than a full buffer; [`Datagrams::flush`] returned the reason.
    pub unsent: u64,
    /// How often the send buffer was full.
    pub blocked: u64,
}

/// Datagrams from one address in the order of arrival, all of `stride` bytes but the last, which may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Train<'a> {
    /// The sender.
    pub from: SocketAddr,
    /// All bytes.
    pub bytes: &'a [u8],
    /// Bytes of each datagram but the last.
    pub stride: usize,
}

impl<'a> Train<'a> {
    /// The datagrams, one after the other. A datagram may be empty.
    pub fn datagrams(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let empty = self.bytes.is_empty().then_some(self.bytes);
        self.bytes.chunks(self.stride.max(1)).chain(empty)
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.stride.max(1)).max(1)
    }
}

/// Where a handler of received trains puts what it wants to send: see [`Datagrams::exchange`].
#[derive(Debug)]
pub struct Outbox<'a> {
    wire: Wire<'a>,
    queue: &'a mut Queue,
}

impl Datagrams {
    /// Binds a socket. With `offloads`, trains go through the kernel in one piece where it can do that. Without, every
    /// datagram is a packet of its own on every interface, as byte-exact measurements need. `buffer_bytes` is requested in
    /// each direction; [`Datagrams::buffer_bytes`] tells what the kernel gave.
    pub fn bind(addr: SocketAddr, offloads: bool, buffer_bytes: usize) -> io::Result<Datagrams> {
        let socket = Socket::new(Domain::for_address(addr), Type::DGRAM.cloexec(), Some(Protocol::UDP))?;
        if addr.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        socket.bind(&addr.into())?;
        enlarge(&socket, buffer_bytes)?;
        let local = socket.local_addr()?.as_socket().ok_or_else(|| io::Error::other("not an IP address"))?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        if !offloads {
            let off: libc::c_int = 0;
            // SAFETY: the pointer and the length are those of `off`, which outlives the call.
            let rc = unsafe {
                libc::setsockopt(
                    socket.as_raw_fd(),
                    libc::SOL_UDP,
                    libc::UDP_GRO,
                    (&raw const off).cast(),
                    mem::size_of_val(&off) as libc::socklen_t,
                )
            };
            // On a kernel without this option it is off.
            if rc != 0 && io::Error::last_os_error().raw_os_error() != Some(libc::ENOPROTOOPT) {
                return Err(io::Error::last_os_error());
            }
        }
        let (trains, piece) = if offloads { (TRAINS, LONGEST_TRAIN) } else { (BATCH, LONGEST_DATAGRAM) };
        let segments = if offloads { state.max_gso_segments() } else { 1 };
        Ok(Datagrams {
            socket: Fd::new(OwnedFd::from(socket)),
            state,
            local,
            offloads: Offloads { segments },
            inbox: vec![0; trains * piece],
            piece,
            queue: Queue::default(),
            counters: DatagramCounters::default(),
        })
    }

    /// The local address.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Sizes of the kernel's buffers (receive, send). Linux includes its bookkeeping, so about half is payload.
    pub fn buffer_bytes(&self) -> io::Result<(usize, usize)> {
        let socket = socket2::SockRef::from(&self.socket);
        Ok((socket.recv_buffer_size()?, socket.send_buffer_size()?))
    }

    /// Requests a send buffer of `bytes` bytes. Datagrams in this buffer leave before all that becomes more urgent later, such
    /// as resends; the rest waits in the caller's queue.
    pub fn set_send_buffer(&self, bytes: usize) -> io::Result<()> {
        socket2::SockRef::from(&self.socket).set_send_buffer_size(bytes)
    }

    /// Datagrams that came and for which the receive buffer had no room.
    pub fn kernel_dropped(&self) -> io::Result<u64> {
        // Linux, include/uapi/linux/sock_diag.h: SK_MEMINFO_DROPS is the last of SK_MEMINFO_VARS words.
        let mut words = [0u32; 9];
        let mut length = mem::size_of_val(&words) as libc::socklen_t;
        // SAFETY: the pointer and the length are those of `words`; the kernel writes at most `length` bytes.
        let rc = unsafe {
            libc::getsockopt(
                self.socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                (&raw mut words).cast(),
                &raw mut length,
            )
        };
        if rc == 0 { Ok(u64::from(words[8])) } else { Err(io::Error::last_os_error()) }
    }

    /// Receives one batch, without waiting, and passes on each datagram. Returns how many there were; 0 if none was waiting.
    pub fn receive(&mut self, mut each: impl FnMut(SocketAddr, &[u8])) -> io::Result<usize> {
        self.exchange(|train, _| train.datagrams().for_each(|datagram| each(train.from, datagram)))
    }

    /// Receives one batch, without waiting, and passes on each train; the handler may send through the outbox meanwhile.
    /// Returns how many datagrams there were; 0 if none was waiting.
    pub fn exchange(&mut self, mut each: impl FnMut(Train<'_>, &mut Outbox<'_>)) -> io::Result<usize> {
        let mut metas = [RecvMeta::default(); BATCH];
        let trains = {
            let mut pieces = self.inbox.chunks_exact_mut(self.piece);
            let count = pieces.len();
            let mut slices: [IoSliceMut<'_>; BATCH] =
                std::array::from_fn(|_| IoSliceMut::new(pieces.next().unwrap_or_default()));
            match self.state.recv(UdpSockRef::from(&self.socket), &mut slices[..count], &mut metas) {
                Ok(trains) => trains,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(error) => return Err(error),
            }
        };
        let mut outbox = Outbox {
            wire: Wire {
                socket: &self.socket,
                state: &self.state,
                offloads: &mut self.offloads,
                counters: &mut self.counters,
            },
            queue: &mut self.queue,
        };
        let mut datagrams = 0;
        for (meta, piece) in metas[..trains].iter().zip(self.inbox.chunks_exact(self.piece)) {
            let train = Train { from: meta.addr, bytes: &piece[..meta.len], stride: meta.stride };
            datagrams += train.count();
            outbox.wire.counters.received_bytes += meta.len as u64;
            each(train, &mut outbox);
        }
        self.counters.received += datagrams as u64;
        self.counters.received_trains += trains as u64;
        Ok(datagrams)
    }

    /// As [`Outbox::queue`].
    pub fn queue(&mut self, to: SocketAddr, header: &[u8], payload: &[u8]) {
        self.outbox().queue(to, header, payload);
    }

    /// As [`Outbox::relay`].
    pub fn relay(&mut self, to: SocketAddr, bytes: &[u8], stride: usize) {
        self.outbox().relay(to, bytes, stride);
    }

    /// Sends everything that waits, until the buffer is full. An error is the first reason since the last call for which
    /// datagrams could not be sent. Those were dropped and counted; all others go on, and the socket is still usable.
    pub fn flush(&mut self) -> io::Result<()> {
        let Outbox { mut wire, queue } = self.outbox();
        queue.flush(&mut |to, bytes, stride| wire.send(to, bytes, stride));
        self.queue.error.take().map_or(Ok(()), Err)
    }

    /// Whether the buffer was full: wait until the descriptor is writable, then flush.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.queue.blocked
    }

    /// The socket's counters so far.
    #[must_use]
    pub fn counters(&self) -> &DatagramCounters {
        &self.counters
    }

    fn outbox(&mut self) -> Outbox<'_> {
        let Datagrams { socket, state, offloads, queue, counters, .. } = self;
        Outbox { wire: Wire { socket, state, offloads, counters }, queue }
    }
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Outbox<'_> {
    /// Appends a datagram to the open train of its destination, and sends the train if it is full. Copies both parts once. At
    /// most 65,507 bytes together.
    pub fn queue(&mut self, to: SocketAddr, header: &[u8], payload: &[u8]) {
        let most = self.wire.offloads.segments;
        let Outbox { wire, queue } = self;
        queue.push(to, header, payload, most, &mut |to, bytes, stride| wire.send(to, bytes, stride));
    }

    /// Sends a train unchanged, at once, without a copy, and after what was queued for the same destination. What the kernel
    /// does not take is copied and waits.
    pub fn relay(&mut self, to: SocketAddr, bytes: &[u8], stride: usize) {
        let Outbox { wire, queue } = self;
        queue.relay(to, bytes, stride, &mut |to, bytes, stride| wire.send(to, bytes, stride));
    }

    /// As [`Datagrams::is_blocked`].
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.queue.blocked
    }
}

#[derive(Debug)]
struct Offloads {
    /// Datagrams in a train, at most; 1 without offloads.
    segments: usize,
}

/// The socket's descriptor and its offloads.
#[derive(Debug)]
struct Wire<'a> {
    socket: &'a Fd,
    state: &'a UdpSocketState,
    offloads: &'a mut Offloads,
    counters: &'a mut DatagramCounters,
}

/// The result of sending a train.
#[derive(Debug)]
enum Sent {
    /// The kernel has it.
    All,
    /// The buffer is full; the kernel took this many bytes of the train.
    Blocked(usize),
    /// Some of the train will never be sent; the rest was.
    Refused(io::Error),
}

impl Wire<'_> {
    fn send(&mut self, to: SocketAddr, bytes: &[u8], stride: usize) -> Sent {
        if self.offloads.segments > 1 || bytes.len() <= stride {
            let count = bytes.len().div_ceil(stride.max(1)).max(1);
            let transmit =
                Transmit { destination: to, ecn: None, contents: bytes, segment_size: Some(stride), src_ip: None };
            match self.state.try_send(UdpSockRef::from(self.socket), &transmit) {
                Ok(()) => {
                    self.counters.sent += count as u64;
                    self.counters.sent_bytes += bytes.len() as u64;
                    self.counters.sent_calls += 1;
                    return Sent::All;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.counters.blocked += 1;
                    return Sent::Blocked(0);
                }
                Err(error) if count == 1 => {
                    self.counters.unsent += 1;
                    return Sent::Refused(error);
                }
                // The interface cannot cut trains. That will not change.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => self.offloads.segments = 1,
                // This train's datagrams do not fit the interface; others may.
                Err(_) => {}
            }
        }
        self.send_each(to, bytes, stride)
    }

    fn send_each(&mut self, to: SocketAddr, bytes: &[u8], stride: usize) -> Sent {
        let address = SockAddr::from(to);
        let (mut done, mut refused) = (0, None);
        while done < bytes.len() {
            // SAFETY: both are plain C structures, for which all zeros is a value.
            let mut parts: [libc::iovec; CALL] = unsafe { mem::zeroed() };
            // SAFETY: as above.
            let mut messages: [libc::mmsghdr; CALL] = unsafe { mem::zeroed() };
            let mut count = 0;
            for (i, datagram) in bytes[done..].chunks(stride).take(CALL).enumerate() {
                parts[i] = libc::iovec { iov_base: datagram.as_ptr().cast_mut().cast(), iov_len: datagram.len() };
                let message = &mut messages[i].msg_hdr;
                message.msg_name = address.as_ptr().cast_mut().cast();
                message.msg_namelen = address.len();
                message.msg_iov = &raw mut parts[i];
                message.msg_iovlen = 1;
                count += 1;
            }
            // SAFETY: `messages` holds `count` headers, whose address and parts live until the end of this loop's body;
            // the kernel only reads through them.
            let sent = unsafe {
                libc::sendmmsg(self.socket.as_fd().as_raw_fd(), messages.as_mut_ptr(), count as libc::c_uint, 0)
            };
            if sent > 0 {
                let next = (done + sent as usize * stride).min(bytes.len());
                self.counters.sent += sent as u64;
                self.counters.sent_bytes += (next - done) as u64;
                self.counters.sent_calls += 1;
                done = next;
                continue;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => {
                    self.counters.blocked += 1;
                    return Sent::Blocked(done);
                }
                _ => {
                    self.counters.unsent += 1;
                    refused.get_or_insert(error);
                    done = (done + stride).min(bytes.len());
                }
            }
        }
        refused.map_or(Sent::All, Sent::Refused)
    }
}

/// What waits to be sent. It does not know the socket: `send` is passed in.
#[derive(Debug, Default)]
struct Queue {
    /// One open train a destination, in the order in which destinations appeared.
    open: Vec<Waiting>,
    /// The train of the last datagram; the next one goes there too, or to the one after.
    last: usize,
    /// Closed trains that the kernel did not take, oldest first.
    waiting: VecDeque<Waiting>,
    /// Buffers for the next trains.
    spare: Vec<Vec<u8>>,
    blocked: bool,
    error: Option<io::Error>,
}

#[derive(Debug)]
struct Waiting {
    to: SocketAddr,
    bytes: Vec<u8>,
    stride: usize,
    /// Bytes that the kernel has taken.
    done: usize,
}

impl Queue {
    fn push(
        &mut self,
        to: SocketAddr,
        header: &[u8],
        payload: &[u8],
        most: usize,
        send: &mut impl FnMut(SocketAddr, &[u8], usize) -> Sent,
    ) {
        let length = header.len() + payload.len();
        let index = self.open(to);
        let train = &mut self.open[index];
        if !train.bytes.is_empty() && (length > train.stride || train.bytes.len() + length > LONGEST_SENT) {
            self.close(index, send);
        }
        let train = &mut self.open[index];
        if train.bytes.is_empty() {
            train.stride = length;
        }
        train.bytes.extend_from_slice(header);
        train.bytes.extend_from_slice(payload);
        // Without offloads a train is what one call of sendmmsg takes.
        let most = if most > 1 { most } else { CALL };
        if length < train.stride || train.bytes.len() >= most * train.stride || length == 0 {
            self.close(index, send);
        }
    }

    fn relay(
        &mut self,
        to: SocketAddr,
        bytes: &[u8],
        stride: usize,
        send: &mut impl FnMut(SocketAddr, &[u8], usize) -> Sent,
    ) {
        let index = self.open(to);
        if !self.open[index].bytes.is_empty() {
            self.close(index, send);
        }
        let rest = if self.blocked {
            bytes
        } else {
            match send(to, bytes, stride) {
                Sent::All => return,
                Sent::Refused(error) => {
                    self.error.get_or_insert(error);
                    return;
                }
                Sent::Blocked(done) => &bytes[done..],
            }
        };
        self.blocked = true;
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.extend_from_slice(rest);
        self.waiting.push_back(Waiting { to, bytes: copy, stride, done: 0 });
    }

    fn flush(&mut self, send: &mut impl FnMut(SocketAddr, &[u8], usize) -> Sent) {
        self.blocked = false;
        while let Some(train) = self.waiting.front_mut() {
            match send(train.to, &train.bytes[train.done..], train.stride) {
                Sent::All => {}
                Sent::Refused(error) => {
                    self.error.get_or_insert(error);
                }
                Sent::Blocked(done) => {
                    train.done += done;
                    self.blocked = true;
                    return;
                }
            }
            let train = self.waiting.pop_front().expect("there is a front");
            self.recycle(train.bytes);
        }
        for index in 0..self.open.len() {
            if !self.open[index].bytes.is_empty() {
                self.close(index, send);
            }
        }
        if self.open.len() > REMEMBERED {
            self.open.clear();
            self.last = 0;
        }
    }

    /// The index of a destination's open train.
    fn open(&mut self, to: SocketAddr) -> usize {
        let count = self.open.len();
        let next = if self.last + 1 < count { self.last + 1 } else { 0 };
        let is_it = |index: usize| index < count && self.open[index].to == to;
        let found = if is_it(self.last) {
            Some(self.last)
        } else if is_it(next) {
            Some(next)
        } else {
            self.open.iter().position(|train| train.to == to)
        };
        self.last = found.unwrap_or_else(|| {
            self.open.push(Waiting { to, bytes: Vec::new(), stride: 0, done: 0 });
            count
        });
        self.last
    }

    /// Sends an open train, or appends it to those that wait.
    fn close(&mut self, index: usize, send: &mut impl FnMut(SocketAddr, &[u8], usize) -> Sent) {
        let Waiting { to, stride, .. } = self.open[index];
        let done = if self.blocked {
            0
        } else {
            match send(to, &self.open[index].bytes, stride) {
                Sent::Blocked(done) => done,
                outcome => {
                    if let Sent::Refused(error) = outcome {
                        self.error.get_or_insert(error);
                    }
                    self.open[index].bytes.clear();
                    return;
                }
            }
        };
        self.blocked = true;
        let bytes = mem::replace(&mut self.open[index].bytes, self.spare.pop().unwrap_or_default());
        self.waiting.push_back(Waiting { to, bytes, stride, done });
    }

    fn recycle(&mut self, mut bytes: Vec<u8>) {
        if self.spare.len() < BATCH {
            bytes.clear();
            self.spare.push(bytes);
        }
    }
}

/// For [`Datagrams::set_send_buffer`] where losses are repaired: some 28 datagrams of 9 KiB with the kernel's bookkeeping.
/// They take 17 ms at 120 Mbit/s and 0.2 ms at 10 Gbit/s.
pub const SHORT_SEND_BUFFER: usize = 256 << 10;

/// First requests buffers beyond the system's limit, which root may have.
fn enlarge(socket: &Socket, bytes: usize) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    for force in [libc::SO_RCVBUFFORCE, libc::SO_SNDBUFFORCE] {
        // SAFETY: the pointer and the length are those of `value`, which outlives the call.
        let rc = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                force,
                (&raw const value).cast(),
                mem::size_of_val(&value) as libc::socklen_t,
            )
        };
        if rc != 0 && force == libc::SO_RCVBUFFORCE {
            socket.set_recv_buffer_size(bytes)?;
        } else if rc != 0 {
            socket.set_send_buffer_size(bytes)?;
        }
    }
    Ok(())
}

/// Datagrams received by one call without offloads.
const BATCH: usize = 32;
/// Trains received by one call with offloads: 256 KiB, so that they are still in the second-level cache when they are read.
const TRAINS: usize = 4;
/// Datagrams sent by one call without offloads; also what Linux takes in a train.
const CALL: usize = 64;
/// The longest train that the kernel can deliver: the length field of IP has 16 bits.
const LONGEST_TRAIN: usize = 1 << 16;
/// More than an MTU of 9000 carries; a longer datagram arrives truncated.
const LONGEST_DATAGRAM: usize = 9216;
/// 16 bits, less IPv6's and UDP's headers (IPv4's is shorter).
const LONGEST_SENT: usize = 65535 - 40 - 8;
/// How many destinations keep a train of their own: all workers of some jobs.
const REMEMBERED: usize = 1024;

#[cfg(test)]
#[path = "datagrams_tests.rs"]
mod tests;
