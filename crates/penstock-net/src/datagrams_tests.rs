use super::*;
use rustix::event::{PollFd, PollFlags, poll};
use std::net::Ipv4Addr;

fn socket(offloads: bool) -> Datagrams {
    Datagrams::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), offloads, 1 << 20).expect("a port of loopback")
}

/// Waits until something can be read; a deadline, not a pause.
fn wait(socket: &Datagrams) {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let limit = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "nothing came within 10 s");
}

fn receive_all(socket: &mut Datagrams, count: usize) -> Vec<(SocketAddr, Vec<u8>)> {
    let mut all = Vec::new();
    while all.len() < count {
        wait(socket);
        socket.receive(|from, datagram| all.push((from, datagram.to_vec()))).unwrap();
    }
    assert_eq!(socket.receive(|_, _| ()).unwrap(), 0, "more than was sent");
    all
}

/// Datagram `i`: its bytes say which it is.
fn datagram(i: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (i * 31 + at) as u8).collect()
}

/// Whatever lengths follow each other, every datagram arrives once, whole and in order, between every mix of sockets with
/// offloads and without.
#[test]
fn datagrams_arrive_as_they_were_queued() {
    let lengths = [8944, 8944, 100, 48, 48, 48, 200, 1, 8944, 8944, 8944, 8944, 8944, 8944, 8944, 8944, 8944, 48];
    for (mine, theirs) in [(true, true), (true, false), (false, true), (false, false)] {
        let (mut sender, mut receiver) = (socket(mine), socket(theirs));
        let to = receiver.local_addr();
        for (i, length) in lengths.iter().enumerate() {
            let bytes = datagram(i, *length);
            let (header, payload) = bytes.split_at(bytes.len().min(48));
            sender.queue(to, header, payload);
        }
        sender.flush().unwrap();
        let all = receive_all(&mut receiver, lengths.len());
        for (i, (from, bytes)) in all.iter().enumerate() {
            assert_eq!(*from, sender.local_addr());
            assert_eq!(*bytes, datagram(i, lengths[i]), "datagram {i} from offloads {mine} to offloads {theirs}");
        }
        assert_eq!(sender.counters().sent, lengths.len() as u64);
        assert_eq!(sender.counters().sent_bytes, lengths.iter().sum::<usize>() as u64);
        assert_eq!(receiver.counters().received_bytes, sender.counters().sent_bytes);
    }
}

/// A train crosses the kernel in one piece with offloads, and as datagrams without.
#[test]
fn trains_save_calls() {
    for (offloads, trains) in [(true, 1), (false, 40)] {
        let (mut sender, mut receiver) = (socket(offloads), socket(offloads));
        if offloads && sender.offloads.segments == 1 {
            eprintln!("this kernel has no UDP_SEGMENT: not tested");
            continue;
        }
        for i in 0..40 {
            sender.queue(receiver.local_addr(), &datagram(i, 48), &datagram(i, 952));
        }
        sender.flush().unwrap();
        assert_eq!(receive_all(&mut receiver, 40).len(), 40);
        assert_eq!((sender.counters().sent_calls, receiver.counters().received_trains), (1, trains));
    }
}

/// What a relay received goes to all its children, byte for byte; from inside the handler of what came.
#[test]
fn a_relay_passes_trains_on() {
    for offloads in [true, false] {
        let (mut parent, mut relay) = (socket(offloads), socket(offloads));
        let mut children = [socket(offloads), socket(true), socket(false)];
        let to: Vec<SocketAddr> = children.iter().map(Datagrams::local_addr).collect();
        for i in 0..5 {
            parent.queue(relay.local_addr(), &datagram(i, 48), &datagram(i, if i == 4 { 10 } else { 1400 }));
        }
        parent.flush().unwrap();
        let mut relayed = 0;
        while relayed < 5 {
            wait(&relay);
            relayed += relay
                .exchange(|train, outbox| to.iter().for_each(|to| outbox.relay(*to, train.bytes, train.stride)))
                .unwrap();
        }
        relay.flush().unwrap();
        for child in &mut children {
            let all = receive_all(child, 5);
            for (i, (from, bytes)) in all.iter().enumerate() {
                let expected = [datagram(i, 48), datagram(i, if i == 4 { 10 } else { 1400 })].concat();
                assert_eq!((*from, bytes), (relay.local_addr(), &expected));
            }
        }
    }
}

/// An empty datagram is one too, and a datagram that does not fit is refused, counted and told, while those around it go.
#[test]
fn odd_datagrams() {
    for offloads in [true, false] {
        let (mut sender, mut receiver) = (socket(offloads), socket(offloads));
        let to = receiver.local_addr();
        sender.queue(to, &[], &[]);
        sender.queue(to, &[1; 100], &[]);
        sender.queue(to, &[0; 48], &vec![0; 65_600]);
        sender.queue(to, &[2; 100], &[]);
        assert_eq!(sender.flush().unwrap_err().raw_os_error(), Some(libc::EMSGSIZE));
        let all: Vec<Vec<u8>> = receive_all(&mut receiver, 3).into_iter().map(|(_, bytes)| bytes).collect();
        assert_eq!(all, [vec![], vec![1; 100], vec![2; 100]]);
        assert_eq!((sender.counters().unsent, sender.counters().sent), (1, 3));
        sender.flush().expect("an error is told once");
    }
}

/// A port that is taken, and an address that is not ours, are the caller's errors.
#[test]
fn addresses_that_cannot_be_had() {
    let taken = socket(true);
    let error = Datagrams::bind(taken.local_addr(), true, 1 << 16).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    let error = Datagrams::bind("192.0.2.1:0".parse().unwrap(), true, 1 << 16).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
}

/// The buffers are at least what was asked for, where the system's limit allows it.
#[test]
fn buffers_grow() {
    let small = Datagrams::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), true, 1 << 14).unwrap();
    let large = Datagrams::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), true, 1 << 17).unwrap();
    assert!(large.buffer_bytes().unwrap().0 > small.buffer_bytes().unwrap().0);
    assert!(large.buffer_bytes().unwrap().1 >= 1 << 17);
}

/// What the receive buffer has no room for is lost, and the kernel says how much: all is accounted for.
#[test]
fn losses_are_known() {
    let mut receiver = Datagrams::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), false, 1 << 12).unwrap();
    let mut sender = socket(false);
    for i in 0..200 {
        sender.queue(receiver.local_addr(), &datagram(i, 1000), &[]);
    }
    sender.flush().unwrap();
    let mut arrived = 0;
    loop {
        match receiver.receive(|_, _| ()).unwrap() {
            0 => break,
            count => arrived += count as u64,
        }
    }
    assert!(arrived > 0 && arrived < 200, "{arrived} of 200 through a buffer of some");
    assert_eq!(arrived + receiver.kernel_dropped().unwrap(), 200);
}

const A: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 1);
const B: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 2);

/// While the buffer is full nothing is offered to it and nothing is lost; what was taken in part goes on where it stopped, and
/// every destination gets its datagrams in order.
#[test]
fn a_full_buffer_loses_nothing() {
    let mut random = 1u64;
    let mut next = move |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    /// A buffer with room for so many datagrams.
    struct Kernel {
        room: usize,
        full: bool,
        got: [Vec<Vec<u8>>; 2],
    }
    impl Kernel {
        fn send(&mut self, to: SocketAddr, bytes: &[u8], stride: usize) -> Sent {
            assert!(!self.full, "a system call that could not succeed");
            let datagrams: Vec<&[u8]> = bytes.chunks(stride).collect();
            let taken = datagrams.len().min(self.room);
            self.got[usize::from(to == B)].extend(datagrams[..taken].iter().map(|one| one.to_vec()));
            self.room -= taken;
            self.full = taken < datagrams.len();
            if self.full { Sent::Blocked(taken * stride) } else { Sent::All }
        }
    }
    for round in 0..300 {
        let mut queue = Queue::default();
        let mut expected: [Vec<Vec<u8>>; 2] = [Vec::new(), Vec::new()];
        let mut kernel = Kernel { room: 0, full: false, got: [Vec::new(), Vec::new()] };
        let mut blocked = 0;
        for step in 0..40 {
            let index = next(2) as usize;
            let to = [A, B][index];
            if next(4) == 0 {
                let bytes = datagram(step, 30);
                expected[index].extend(bytes.chunks(12).map(<[u8]>::to_vec));
                queue.relay(to, &bytes, 12, &mut |to, bytes, stride| kernel.send(to, bytes, stride));
            } else {
                let bytes = datagram(step, [10, 10, 10, 4, 20][next(5) as usize]);
                queue.push(to, &bytes[..2], &bytes[2..], 8, &mut |to, bytes, stride| kernel.send(to, bytes, stride));
                expected[index].push(bytes);
            }
            assert_eq!(queue.blocked, kernel.full, "round {round}, step {step}");
            blocked += usize::from(queue.blocked);
            if next(3) == 0 {
                (kernel.full, kernel.room) = (false, next(6) as usize);
                queue.flush(&mut |to, bytes, stride| kernel.send(to, bytes, stride));
            }
        }
        assert!(blocked > 0, "round {round} never blocked");
        (kernel.full, kernel.room) = (false, usize::MAX);
        queue.flush(&mut |to, bytes, stride| kernel.send(to, bytes, stride));
        assert_eq!(kernel.got, expected, "round {round}");
        assert!(!queue.blocked && queue.waiting.is_empty());
    }
}
