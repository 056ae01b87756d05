//! Polling a stream that has nothing to send costs no memory, with thousands of messages in flight or waiting.
//!
//! A binary of its own, because it counts every allocation of the process.

use penstock_stream::Reference;
use penstock_stream::fingerprint::Fingerprint;
use penstock_stream::frame::NumberSpace;
use penstock_stream::peer::{Body, OpStatus, Outgoing, Peer, PeerConfig};
use penstock_stream::{Header, Kind, MessageKey};
use penstock_types::{ChannelId, GroupId, MILLISECOND, OpSeq, Priority, Time};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The allocations that a call makes.
fn allocations(call: impl FnOnce()) -> usize {
    let before = COUNT.with(Cell::get);
    call();
    COUNT.with(Cell::get) - before
}

/// No poll that returns nothing allocates, nor a clock tick; the counter itself counts.
#[test]
fn idle_polls_do_not_allocate() {
    assert_eq!(allocations(|| drop(vec![1u8])), 1);

    let mut peer = Peer::new(PeerConfig::default(), Time(0));
    (0..8).for_each(|stream| peer.stream_up(stream, Time(0)));
    let key = |message| MessageKey {
        group: GroupId(1),
        space: NumberSpace::Collective(ChannelId::MAIN),
        op: OpSeq(0),
        message,
    };
    for message in 0..4000 {
        let body = Body::Memory { place: Reference { address: 0, epoch: 0, region: 0 }, len: 1000 };
        peer.send(Outgoing {
            key: key(message),
            priority: Priority(0),
            is_changed: false,
            fingerprint: Fingerprint::default(),
            coflow: 0,
            body,
        });
    }
    let grant = Header { offset: 2000, ..Header::new(Kind::Grant, key(0)) };
    peer.handle_header(0, &grant, OpStatus::Active, Time(0)).expect("a good header");
    peer.handle_frame(0, &grant, &[], OpStatus::Active).expect("a good frame");
    while peer.poll_event().is_some() {}
    let mut frames = 0;
    for stream in 0..8 {
        while peer.poll_frame(stream, Time(1)).is_some() {
            frames += 1;
        }
    }
    assert!(frames >= 2000, "{frames}");

    // Two thousand frames are in flight, two thousand messages wait; some of what is silent is taken over meanwhile.
    let (mut idle, mut taken_over) = (0, 0);
    for tick in 1..600 {
        let now = Time(tick * MILLISECOND);
        assert_eq!(allocations(|| peer.handle_timeout(now)), 0);
        assert_eq!(allocations(|| _ = std::hint::black_box(peer.poll_timeout(now))), 0);
        for stream in 0..8 {
            let mut is_idle = false;
            let count = allocations(|| is_idle = peer.poll_frame(stream, now).is_none());
            assert!(!is_idle || count == 0, "{count} allocations");
            idle += usize::from(is_idle);
            taken_over += usize::from(!is_idle);
        }
    }
    assert!(idle > 1000 && taken_over > 0, "{idle} idle, {taken_over} taken over");
}
