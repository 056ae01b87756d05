use super::*;
use penstock_core::operation::{Awaited, Effect, Incoming, Misfit, Operation};
use penstock_net::memory::MemoryEpoch;
use penstock_plan::{Algorithm, Collective, Placement, Request, steps};
use proptest::prelude::*;

/// The bytes of an incoming message.
#[derive(Debug)]
enum Message<'a> {
    /// Here, in order of arrival; the first byte is the message's `offset`.
    Bytes { offset: u64, payload: &'a [u8] },
    /// Already where they belong.
    Placed { len: usize },
    /// In the memory of a process on this host.
    Remote(Remote),
}

/// A running plan and its bytes, as the core and the runtime drive them.
#[derive(Debug)]
struct Execution {
    operation: Operation,
    buffers: Buffers,
}

impl Execution {
    fn new(steps: Arc<Steps>, memory: Memory) -> Execution {
        let buffers = Buffers::new(steps.clone(), memory);
        Execution { operation: Operation::new(steps, buffers.addresses.memory.dtype.size() as u64), buffers }
    }

    /// Where bytes from `offset` on of an incoming message belong, if they only have to lie there.
    fn place(&self, from: u32, message: u32, offset: u64, len: u64, total: u64) -> Option<*mut u8> {
        Some(self.buffers.address(self.operation.place(from, message, offset, len, total)?))
    }

    /// Bytes `offset..offset + len` of an outgoing message.
    fn source(&self, to: u32, message: u32, offset: u64, len: usize) -> Option<*const u8> {
        Some(self.address(self.operation.source(to, message, offset, len)?))
    }

    /// Where bytes that are to be sent lie.
    fn address(&self, place: Place) -> *const u8 {
        self.buffers.address(place).cast_const()
    }

    /// Takes (a part of) an open message, see [`Operation::on_message`].
    fn on_message(
        &mut self,
        from: u32,
        message: u32,
        total: u64,
        content: Message<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Misfit> {
        let incoming = match &content {
            Message::Bytes { offset, payload } => Incoming::Frame { offset: *offset, len: payload.len() as u64 },
            Message::Placed { len } => Incoming::Placed { len: *len as u64 },
            Message::Remote(_) => Incoming::Reference,
        };
        let verdict = self.operation.on_message(from, message, total, incoming, effects)?;
        match content {
            Message::Bytes { offset, payload } => self.buffers.take(verdict, offset, payload),
            Message::Placed { .. } => {}
            Message::Remote(remote) => self.buffers.take_kept(verdict, Kept::Remote(remote)),
        }
        Ok(())
    }

    /// Does what [`Effect::Compute`] asks for.
    fn compute(&mut self, instance: Instance) {
        let read = self.buffers.compute(instance);
        debug_assert!(read.is_ok_and(|read| read.is_empty()), "what is kept as bytes needs no reading");
    }

    /// Does one piece of what takes long: reads (and reduces) messages that lie in other processes' memory, or copies what is
    /// here. The error names the rank whose memory cannot be read.
    fn work(&mut self, effects: &mut Vec<Effect>) -> Result<(), (u32, Misfit)> {
        let Some(instance) = self.operation.next_work() else { return Ok(()) };
        let read = self.buffers.compute(instance).map_err(|(operand, error)| {
            let (from, _) = self.operation.sender(instance, operand);
            (from, Misfit::Unreadable(error.to_string()))
        })?;
        self.operation.worked(instance, read, effects);
        Ok(())
    }

    /// Bytes of the engine's own that it holds.
    fn memory_bytes(&self) -> usize {
        self.buffers.bytes()
    }
}

/// Does what is wanted of memory; what is wanted of other ranks stays in the list.
fn settle(execution: &mut Execution, effects: &mut Vec<Effect>) {
    effects.retain(|effect| {
        let Effect::Compute(instance) = effect else { return true };
        execution.compute(*instance);
        false
    });
}

/// Messages that an operation waits for.
fn missing(execution: &Execution) -> usize {
    let awaited = execution.operation.awaited_messages();
    awaited.iter().filter(|(_, what)| matches!(what, Awaited::Message(_))).count()
}

/// A receive of 100 KB from rank 0, whose memory is our own: the sender's bytes, the memory epoch, the operation.
fn receive(result: &mut [u8]) -> Execution {
    let request = Request {
        collective: Collective::Recv { from: 0 },
        world: 2,
        rank: 1,
        placement: Placement::one_host(2),
        bytes: result.len() as u64,
        element_bytes: 1,
        splits: None,
        segment_bytes: 1 << 20,
    };
    let steps = Arc::new(steps(&request, Algorithm::Direct).expect("a plan"));
    let (op, output) = (ReduceOp::Sum, result.as_mut_ptr());
    Execution::new(steps, Memory { dtype: DType::U8, op, world: 2, input: std::ptr::null(), output })
}

fn given(bytes: &[u8], memory_epoch: &MemoryEpoch) -> Message<'static> {
    let (pid, address) = (std::process::id(), bytes.as_ptr() as u64);
    Message::Remote(Remote::Process { pid, address, memory_epoch: memory_epoch.address(), epoch: memory_epoch.epoch() })
}

/// A reference waits for its turn to be read; what was read while the sender's epoch lasted is what was meant.
#[test]
fn references_are_read_when_there_is_time() {
    let (theirs, memory_epoch, mut result) = (vec![7; 100_000], MemoryEpoch::new([1; 16]), vec![0; 100_000]);
    let (mut execution, mut effects) = (receive(&mut result), Vec::new());
    execution.operation.start(&mut effects);
    assert_eq!(effects, [Effect::Open { from: 0, message: 0, count: 1 }]);
    effects.clear();
    execution.on_message(0, 0, 100_000, given(&theirs, &memory_epoch), &mut effects).expect("it fits");
    assert!(effects.is_empty() && execution.operation.has_work() && !execution.operation.is_done());
    assert!(execution.operation.awaited().is_empty(), "the message is here");
    execution.work(&mut effects).expect("own memory");
    assert_eq!(effects, [Effect::Read { from: 0, message: 0 }]);
    assert!(execution.operation.is_done() && !execution.operation.has_work());
    drop(execution);
    assert_eq!(result, theirs);
}

/// A large copy of a rank's own part takes a turn for each segment; a small one is done at once.
#[test]
fn large_copies_take_turns() {
    for (bytes, segment_bytes, turns) in [(4 << 20, 1 << 20, 4), (100_000, 1 << 20, 0)] {
        let request = Request {
            collective: Collective::AllGather,
            world: 1,
            rank: 0,
            placement: Placement::one_host(1),
            bytes,
            element_bytes: 1,
            splits: None,
            segment_bytes,
        };
        let (algorithm, _) = penstock_plan::choose(&request, &penstock_plan::Thresholds::default());
        let steps = Arc::new(steps(&request, algorithm).expect("a plan"));
        let (input, mut output) = (vec![7u8; bytes as usize], vec![0u8; bytes as usize]);
        let (input, place) = (input.as_ptr(), output.as_mut_ptr());
        let memory = Memory { dtype: DType::U8, op: ReduceOp::Sum, world: 1, input, output: place };
        let (mut execution, mut effects) = (Execution::new(steps, memory), Vec::new());
        execution.operation.start(&mut effects);
        settle(&mut execution, &mut effects);
        let mut taken = 0;
        while execution.operation.has_work() {
            assert!(!execution.operation.is_done());
            execution.work(&mut effects).expect("its own memory");
            taken += 1;
        }
        assert!(execution.operation.is_done() && effects.is_empty());
        drop(execution);
        assert_eq!((taken, output.iter().all(|byte| *byte == 7)), (turns, true));
    }
}

/// Several messages that are reduced at once may come as frames, in any order, interleaved; and nothing is reduced
/// before all are whole. The result is that of one frame each.
#[test]
fn frames_of_several_messages_are_held_until_whole() {
    let (len, world) = (5000u64, 3);
    let request = Request {
        collective: Collective::AllReduce,
        world,
        rank: 0,
        placement: Placement::one_host(world),
        bytes: len,
        element_bytes: 1,
        splits: None,
        segment_bytes: 1 << 20,
    };
    let steps = Arc::new(steps(&request, Algorithm::Exchange).expect("a plan"));
    let theirs: Vec<Vec<u8>> =
        (1..world).map(|rank| (0..len).map(|at| (at % 50) as u8 + rank as u8).collect()).collect();
    let mut result = vec![1u8; len as usize];
    let memory =
        Memory { dtype: DType::U8, op: ReduceOp::Sum, world, input: std::ptr::null(), output: result.as_mut_ptr() };
    let (mut execution, mut effects) = (Execution::new(steps, memory), Vec::new());
    execution.operation.start(&mut effects);
    let opened: Vec<(u32, u32)> = effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Open { from, message, .. } => Some((*from, *message)),
            _ => None,
        })
        .collect();
    assert_eq!(opened.len(), 2, "{effects:?}");
    for at in [4000, 0, 1000, 3000, 2000u64] {
        for (from, message) in &opened {
            assert_eq!(missing(&execution), 2);
            let payload = &theirs[*from as usize - 1][at as usize..at as usize + 1000];
            let incoming = Message::Bytes { offset: at, payload };
            execution.on_message(*from, *message, len, incoming, &mut effects).expect("it fits");
            if at == 2000 {
                break;
            }
        }
    }
    let (from, message) = opened[1];
    let incoming = Message::Bytes { offset: 2000, payload: &theirs[from as usize - 1][2000..3000] };
    assert_eq!(missing(&execution), 1);
    assert!(execution.memory_bytes() >= 2 * len as usize);
    execution.on_message(from, message, len, incoming, &mut effects).expect("it fits");
    for effect in effects.clone() {
        if let Effect::Send { to, message, .. } = effect {
            execution.operation.on_sent(to, message, &mut effects);
        }
    }
    settle(&mut execution, &mut effects);
    assert!(execution.operation.is_done());
    drop(execution);
    assert!(result.iter().zip(0..len).all(|(got, at)| u64::from(*got) == 1 + 2 * (at % 50) + 1 + 2));
}

/// A message that the plan does not have, or has with another length, is refused; the one that it has is taken.
#[test]
fn messages_that_the_plan_does_not_have() {
    let length = |got| Misfit::Length { expected: 1000, got };
    for (from, message, total, refused) in [
        (0, 0, 999, Some(length(999))),
        (0, 0, 1001, Some(length(1001))),
        (0, 0, 0, Some(length(0))),
        (0, 1, 1000, Some(Misfit::Unknown)),
        (0, u32::MAX, 1000, Some(Misfit::Unknown)),
        (1, 0, 1000, Some(Misfit::Unknown)),
        (0, 0, 1000, None),
    ] {
        let (payload, mut result) = (vec![7; total as usize], vec![0; 1000]);
        let (mut execution, mut effects) = (receive(&mut result), Vec::new());
        execution.operation.start(&mut effects);
        let incoming = Message::Bytes { offset: 0, payload: &payload };
        let taken = execution.on_message(from, message, total, incoming, &mut effects);
        assert_eq!(taken.err(), refused, "{total} bytes as message {message} of rank {from}");
        assert_eq!(execution.operation.is_done(), refused.is_none());
        drop(execution);
        assert_eq!(result, vec![if refused.is_none() { 7 } else { 0 }; 1000]);
    }
}

/// A sender whose epoch has turned may have changed its bytes: the operation does not end before its word, and a word
/// on anything else does not count.
#[test]
fn doubtful_bytes_wait_for_the_senders_word() {
    let (theirs, memory_epoch, mut result) = (vec![7; 100_000], MemoryEpoch::new([1; 16]), vec![0; 100_000]);
    let (mut execution, mut effects) = (receive(&mut result), Vec::new());
    execution.operation.start(&mut effects);
    let incoming = given(&theirs, &memory_epoch);
    memory_epoch.turn();
    effects.clear();
    execution.on_message(0, 0, 100_000, incoming, &mut effects).expect("it fits");
    execution.work(&mut effects).expect("own memory");
    assert_eq!(effects, [Effect::Doubt { from: 0, message: 0 }]);
    assert!(!execution.operation.is_done());
    effects.clear();
    execution.operation.on_confirmed(0, 1, &mut effects);
    execution.operation.on_confirmed(3, 0, &mut effects);
    assert!(effects.is_empty() && !execution.operation.is_done());
    execution.operation.on_confirmed(0, 0, &mut effects);
    assert_eq!(effects, [Effect::Read { from: 0, message: 0 }]);
    assert!(execution.operation.is_done());
    execution.operation.on_confirmed(0, 0, &mut effects);
    assert_eq!(effects.len(), 1, "told twice");
}

/// Memory that is gone is named with the rank that it belonged to, and nothing is done with the operation.
#[test]
fn memory_that_is_gone_names_its_rank() {
    let (memory_epoch, mut result) = (MemoryEpoch::new([1; 16]), vec![0; 100_000]);
    let (mut execution, mut effects) = (receive(&mut result), Vec::new());
    execution.operation.start(&mut effects);
    effects.clear();
    let pid = std::process::id();
    let incoming = Remote::Process { pid, address: 4096, memory_epoch: memory_epoch.address(), epoch: 0 };
    execution.on_message(0, 0, 100_000, Message::Remote(incoming), &mut effects).expect("it fits");
    let (rank, misfit) = execution.work(&mut effects).expect_err("nobody has page 1");
    assert!(rank == 0 && matches!(misfit, Misfit::Unreadable(_)), "{misfit:?}");
    assert!(effects.is_empty() && !execution.operation.is_done());
}

/// Frames whose bytes are not whole elements of the message, or do not lie inside it, are refused before anything is
/// reduced; those that are, at any offset, are taken.
#[test]
fn frames_hold_whole_elements() {
    let request = Request {
        collective: Collective::Reduce { root: 0 },
        world: 2,
        rank: 0,
        placement: Placement::separate_hosts(2),
        bytes: 40_000,
        element_bytes: 4,
        splits: None,
        segment_bytes: 1 << 20,
    };
    let steps = Arc::new(steps(&request, Algorithm::Direct).expect("a plan"));
    for (offset, len, fits) in [
        (0, 16_385, false),
        (16_385, 4, false),
        (2, 4, false),
        (39_996, 8, false),
        (u64::MAX - 3, 4, false),
        (0, 16_384, true),
        (39_996, 4, true),
        (0, 40_000, true),
    ] {
        let mut result = vec![1.0f32; 10_000];
        let output = result.as_mut_ptr().cast();
        let memory = Memory { dtype: DType::F32, op: ReduceOp::Sum, world: 2, input: std::ptr::null(), output };
        let (mut execution, mut effects) = (Execution::new(steps.clone(), memory), Vec::new());
        execution.operation.start(&mut effects);
        let payload = 2.0f32.to_le_bytes().repeat(len as usize / 4 + 1);
        let incoming = Message::Bytes { offset, payload: &payload[..len as usize] };
        let taken = execution.on_message(1, 0, 40_000, incoming, &mut effects);
        assert_eq!(taken, if fits { Ok(()) } else { Err(Misfit::Frame { offset, len }) });
        drop(execution);
        let reduced = result.iter().filter(|value| **value == 3.0).count() as u64;
        assert_eq!(reduced, if fits { len / 4 } else { 0 }, "{offset}+{len}");
    }
}

/// What may happen to an operation: frames of any shape, and what the runtime tells it.
#[derive(Clone, Debug)]
enum Call {
    Frame { from: u32, message: u32, total: Option<u64>, offset: u64, len: usize },
    Placed { from: u32, message: u32, offset: u64, len: u64 },
    Sent { to: u32, message: u32 },
    Confirmed { from: u32, message: u32 },
    Source { to: u32, message: u32 },
    Work,
}

fn call() -> impl Strategy<Value = Call> {
    let message = || prop_oneof![8 => 0u32..6, 1 => Just(u32::MAX)];
    let place = || prop_oneof![3 => (0u64..40).prop_map(|n| n * 16), 1 => 0u64..700, 1 => Just(u64::MAX)];
    let length = || prop_oneof![3 => (0u64..40).prop_map(|n| n * 16), 1 => 0u64..700];
    prop_oneof![
        8 => (0u32..5, message(), proptest::option::weighted(0.1, place()), place(), length())
            .prop_map(|(from, message, total, offset, len)| Call::Frame { from, message, total, offset, len: len as usize }),
        1 => (0u32..5, message(), place(), length())
            .prop_map(|(from, message, offset, len)| Call::Placed { from, message, offset, len }),
        3 => (0u32..5, message()).prop_map(|(to, message)| Call::Sent { to, message }),
        1 => (0u32..5, message()).prop_map(|(from, message)| Call::Confirmed { from, message }),
        1 => (0u32..5, message()).prop_map(|(to, message)| Call::Source { to, message }),
        1 => Just(Call::Work),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever frames come, whenever: an operation never panics, and touches only its own buffers. A frame is taken
    /// only for a message that is open, has the length that the plan gives it, and is not over.
    #[test]
    fn any_frames_are_survived(
        which in 0usize..9,
        dtype in prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F64), Just(DType::U8)],
        rank in 0u32..4,
        elements in 0u64..80,
        one_host: bool,
        calls in proptest::collection::vec(call(), 1..60),
    ) {
        let (world, size) = (4u32, dtype.size() as u64);
        let collective = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::Broadcast { root: 1 },
            Collective::Reduce { root: 2 },
            Collective::Gather { root: 0 },
            Collective::Scatter { root: 3 },
            Collective::AllToAll,
            Collective::Barrier,
        ][which];
        let splits = (collective == Collective::AllToAll).then(|| {
            let parts: Vec<u64> = (0..u64::from(world)).map(|to| elements * size * ((to + 1) % 3)).collect();
            penstock_plan::Splits { input: parts.clone(), output: parts }
        });
        let whole = elements * size * u64::from(world);
        let request = Request {
            collective,
            world,
            rank,
            placement: if one_host { Placement::one_host(world) } else { Placement::separate_hosts(world) },
            bytes: if collective == Collective::Barrier { 0 } else { whole },
            element_bytes: size as u32,
            splits,
            segment_bytes: 64,
        };
        for algorithm in Algorithm::of(collective) {
            let Ok(steps) = steps(&request, *algorithm) else { continue };
            const GUARD: usize = 64;
            let input = vec![1u8; request.input_bytes() as usize];
            let mut output = vec![0xa5u8; request.output_bytes() as usize + 2 * GUARD];
            let memory = Memory {
                dtype,
                op: ReduceOp::Max,
                world,
                input: input.as_ptr(),
                output: output.as_mut_ptr().wrapping_add(GUARD),
            };
            let (mut execution, mut effects) = (Execution::new(Arc::new(steps), memory), Vec::new());
            execution.operation.start(&mut effects);
            settle(&mut execution, &mut effects);
            for call in &calls {
                match *call {
                    Call::Frame { from, message, total, offset, len } => {
                        let open = execution.operation.is_open(from, message);
                        let expected = execution.operation.expected(from, message);
                        let total = total.or(expected).unwrap_or(64);
                        let payload = vec![7u8; len];
                        let incoming = Message::Bytes { offset, payload: &payload };
                        if execution.on_message(from, message, total, incoming, &mut effects).is_ok() {
                            prop_assert_eq!(open, Some(true));
                            prop_assert_eq!(expected, Some(total));
                            prop_assert!(total == 0 || offset.checked_add(len as u64).is_some_and(|end| end <= total));
                        }
                    }
                    Call::Placed { from, message, offset, len } => {
                        let total = execution.operation.expected(from, message).unwrap_or(0);
                        let inside = offset.checked_add(len).is_some_and(|end| end <= total);
                        if inside && let Some(place) = execution.place(from, message, offset, len, total) {
                            let own = output.as_ptr_range();
                            let ends = place.wrapping_add(len as usize).cast_const();
                            let scratch = execution.buffers.scratch.as_ptr_range();
                            prop_assert!(
                                own.start.wrapping_add(GUARD) <= place && ends <= own.end.wrapping_sub(GUARD)
                                    || scratch.start <= place && ends <= scratch.end
                            );
                            let incoming = Message::Placed { len: len as usize };
                            let _ = execution.on_message(from, message, total, incoming, &mut effects);
                        }
                    }
                    Call::Sent { to, message } => execution.operation.on_sent(to, message, &mut effects),
                    Call::Confirmed { from, message } => execution.operation.on_confirmed(from, message, &mut effects),
                    Call::Source { to, message } => drop(execution.source(to, message, 0, 0)),
                    Call::Work => drop(execution.work(&mut effects)),
                }
                settle(&mut execution, &mut effects);
                effects.clear();
                let _ = (execution.operation.awaited(), execution.memory_bytes());
            }
            drop(execution);
            prop_assert!(output[..GUARD].iter().chain(&output[output.len() - GUARD..]).all(|byte| *byte == 0xa5));
            prop_assert!(input.iter().all(|byte| *byte == 1));
        }
    }
}
