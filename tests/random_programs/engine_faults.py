"""Faults to plant, one at a time, in the crates: each must be found by programs under virtual time, or these do not see its kind.

``./dev fuzz --virtual --mutant NAME`` plants them in a copy of the tree (`plant`). Each is a text that stands once in its
file, and what stands there instead. Where programs do not find a fault, ``expected`` says why, and ``test`` is one that fails.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Test:
    """A test of the crates."""

    package: str
    name: str
    """With its module."""
    file: str = ""
    """Of the package's ``tests``; empty: it is in the library."""

    def __str__(self) -> str:
        return f"{self.package}, {self.file or 'lib'}: {self.name}"


@dataclasses.dataclass(frozen=True)
class EngineFault:
    """A fault of the crates."""

    file: str
    """Below ``crates``."""
    text: str
    replacement: str
    what: str
    """What it does."""
    seed: int = 0
    """The first seed to look for it with."""
    expected: str = ""
    """Why programs do not find it, if they do not."""
    test: Test | None = None
    """What fails with it instead; ``None`` if it has no effect."""


# The parts of paths that most of them share.
_GROUPS = "penstock-core/src/groups"
_PEER = "penstock-stream/src/peer"
_DRIVER = "penstock-net/src/driver"
_ENDPOINT = "penstock-core/src/endpoint"
# What finds faults in how threads use claims.
_STANDING = Test("penstock-engine", "virtual_time::threads_that_stand_still_within_claims")
_ORDER = "programs tell what ranks get, not when: nothing is wrong but the order in which frames leave"
_NO_ENDPOINTS = "programs make no calls of endpoints"
_STANDS_STILL = "it takes a fault, or a second copy, while a thread stands still within a claim"

FAULTS = {
    # ------------------------------------------------------------------------------------ what ranks compare, and probes
    "probe-answered-from-own-send": EngineFault(
        f"{_GROUPS}/events.rs",
        """            match group.fingerprint(op, other) {
                Some(ours) if ours != theirs => return group.mismatch(common, host, op, peer, theirs),""",
        """            let own = match op.sequence {
                crate::name::Sequence::Receives { from, tag } => {
                    OpId { sequence: crate::name::Sequence::Sends { to: from, tag }, ..op }
                }
                _ => op,
            };
            match group.fingerprint(own, other) {
                Some(ours) if ours != theirs => return group.mismatch(common, host, own, peer, theirs),""",
        "what a rank says of a message that it sends is compared with this rank's own send of that tag and number",
    ),
    "pairs-with-nothing-not-compared": EngineFault(
        "penstock-plan/src/build/shards.rs",
        """        if splits.is_some() && src.len == 0 {
            draft.push(1, Action::Notify { to: peer, message: 0 }, []);
        } else {
            draft.send(peer, 0, src, []);
        }
    }
    let (dst, src) = (place(draft, Buf::Output, draft.rank), place(draft, Buf::Input, draft.rank));
    draft.copy(dst, src, []);
    let mut others: Vec<u32> = draft.others().collect();
    others.reverse();
    for peer in others {
        let dst = place(draft, Buf::Output, peer);
        if splits.is_some() && dst.len == 0 {
            draft.push(1, Action::Await { from: peer, message: 0 }, []);
        } else {
            draft.recv(peer, 0, dst, []);
        }
    }""",
        """        draft.send(peer, 0, src, []);
    }
    let (dst, src) = (place(draft, Buf::Output, draft.rank), place(draft, Buf::Input, draft.rank));
    draft.copy(dst, src, []);
    let mut others: Vec<u32> = draft.others().collect();
    others.reverse();
    for peer in others {
        let dst = place(draft, Buf::Output, peer);
        draft.recv(peer, 0, dst, []);
    }""",
        "two ranks of an all-to-all, of which one expects nothing of the other, do not hear from each other",
    ),
    "dtype-not-compared": EngineFault(
        "penstock-stream/src/fingerprint.rs",
        "            | (dtype as u64 & 0x3f) << 50\n",
        "",
        "ranks may call one operation with different dtypes",
    ),
    "root-not-compared": EngineFault(
        "penstock-stream/src/fingerprint.rs",
        "            | root << 36\n",
        "",
        "ranks may call one operation with different roots",
    ),
    "early-beliefs-not-compared": EngineFault(
        f"{_GROUPS}/issue.rs",
        "let odd = beliefs.into_iter().chain(told).find(|(peer, theirs)| {",
        "let odd = beliefs.into_iter().chain(told).filter(|_| false).find(|(peer, theirs)| {",
        "what came before an operation began is not compared with it",
        expected="the other rank compares what this one sends and asks",
        test=Test("penstock-core", "groups::tests::channels::another_order_of_opening_is_a_mismatch"),
    ),
    "probes-not-compared": EngineFault(
        f"{_GROUPS}/events.rs",
        "Some(ours) if ours != theirs => return group.mismatch(common, host, op, peer, theirs),",
        "Some(ours) if false && ours != theirs => return group.mismatch(common, host, op, peer, theirs),",
        "grants, probes and late frames of another operation are taken for those of this one",
    ),
    "ended-operations-forgotten": EngineFault(
        f"{_GROUPS}/progress.rs",
        "            known.ended.remember(op, active.fingerprint);\n",
        "            let _ = known;\n",
        "what has ended is not compared any more",
    ),
    "late-frames-not-compared": EngineFault(
        f"{_PEER}/receive.rs",
        "            self.events.push_back(Event::Late(header.key, header.fingerprint));\n",
        "",
        "a frame of an operation that has ended here is dropped without a look at what its sender takes it for",
        expected="a probe, or what came early, mostly shows the same a second later",
        test=Test("penstock-stream", "peer::tests::streams::nothing_is_used_after_its_operation"),
    ),
    "farewells-not-compared": EngineFault(
        f"{_GROUPS}/departure.rs",
        "find(|(_, other)| *other != theirs)",
        "find(|(_, other)| false && *other != theirs)",
        "what a rank says it did before it left is not compared",
        expected="ranks that make different operations nearly always learn it from frames or probes before one leaves",
        test=Test("penstock-core", "groups::tests::what_a_rank_did_before_it_left_is_compared"),
    ),
    "no-probes": EngineFault(
        f"{_GROUPS}/deadlines.rs",
        "        self.probe_for_silent(host, now);\n",
        "",
        "operations without progress do not ask",
    ),
    # ------------------------------------------------------------------------------------------------------- messages
    "eager-messages-beyond-credit": EngineFault(
        f"{_GROUPS}/progress.rs",
        "let is_copied = is_short && machine.has_credit(len);",
        "let is_copied = is_short;",
        "a short message without credit counts as sent while its receiver does not know of it",
    ),
    "empty-messages-need-no-credit": EngineFault(
        f"{_GROUPS}/progress.rs",
        "let is_copied = is_short && machine.has_credit(len);",
        "let is_copied = is_short && (len == 0 || machine.has_credit(len));",
        "an empty message without credit counts as sent while its receiver does not know of it",
        expected="hundreds of them would have to wait at once",
        test=Test("penstock-engine", "short_messages_wait_for_credit", "conformance"),
    ),
    "credit-not-given-back": EngineFault(
        f"{_GROUPS}/progress.rs",
        """                    if uses_credit {
                        host.machine(peer).consumed(total);
                    }
                    let incoming""",
        "                    let incoming",
        "the credit of messages that came early is lost",
    ),
    "credit-not-repeated": EngineFault(
        "penstock-stream/src/peer.rs",
        "        self.credit.owes_update = true;\n",
        "",
        "the newest credit is not repeated when its stream was lost",
        expected="every frame carries the credit",
        test=Test("penstock-stream", "peer::tests::streams::returned_credit_survives_a_lost_stream"),
    ),
    "resend-applied-twice": EngineFault(
        f"{_PEER}/receive.rs",
        "            message.done.insert(span(header));\n",
        "",
        "a frame that comes again is reduced again",
    ),
    "loser-of-a-race-not-revoked": EngineFault(
        f"{_PEER}/receive.rs",
        "revoke: arriving.on.filter(|first| *first != id)",
        "revoke: None",
        "a stream goes on writing a frame to its place that another stream has brought",
    ),
    "duplicate-acknowledgements-count": EngineFault(
        f"{_PEER}/receive.rs",
        "        if frame.acked {\n            return false;\n        }\n",
        "",
        "a frame that two streams brought counts twice, and the message as taken too early",
    ),
    "given-back-before-it-is-taken": EngineFault(
        f"{_GROUPS}/progress.rs",
        """                if is_copied {
                    active.operation.on_sent""",
        """                if is_copied || len > 0 {
                    active.operation.on_sent""",
        "the user has the memory of a long message back while it is sent",
    ),
    "frames-of-a-lost-stream-not-repeated": EngineFault(
        "penstock-stream/src/peer.rs",
        "                            message.again.push(index);\n",
        "",
        "data that a lost stream had is lost",
    ),
    "control-frames-of-a-lost-stream-not-repeated": EngineFault(
        "penstock-stream/src/peer.rs",
        "                        self.controls.queue.push_front(id);\n",
        "                        let _ = id;\n",
        "grants, farewells and the like that a lost stream had are lost",
    ),
    "report-of-a-lost-stream-not-repeated": EngineFault(
        "penstock-stream/src/peer.rs",
        "                        && control.copies.remove(stream)\n",
        "                        && control.copies.remove(stream)\n"
        "                        && control.header.kind != crate::frame::Kind::Report\n",
        "a failure's report is not repeated when its stream was lost",
        expected="all other ranks report as well",
        test=Test("penstock-stream", "peer::tests::streams::control_frames_of_a_lost_stream_are_repeated"),
    ),
    "control-frames-count-twice": EngineFault(
        f"{_PEER}/receive.rs",
        "let new = !self.controls.taken.covers(&one);",
        "let new = true;",
        "control frames that are repeated are used again",
        expected="over TCP none does more the second time; references, for which it matters, are not drawn",
        test=Test("penstock-stream", "peer::tests::streams::references_are_read_once"),
    ),
    "stalled-stream-not-closed": EngineFault(
        f"{_PEER}/time.rs",
        "                self.events.push_back(Event::Stalled(*id));\n",
        "                let _ = id;\n",
        "a stream that stalls is not closed",
        expected="its frames are taken over by others",
        test=Test("penstock-stream", "peer::tests::life::a_stalled_stream_is_reported"),
    ),
    "own-absence-counts-as-silence": EngineFault(
        f"{_PEER}/time.rs",
        "            self.was_away(late, now);\n",
        "",
        "a process that was stopped loses its peers when it goes on",
    ),
    "kept-part-at-the-beginning": EngineFault(
        "penstock-engine/src/buffers.rs",
        "bytes[offset as usize..][..payload.len()]",
        "bytes[..payload.len()]",
        "parts of a message that is kept overwrite each other",
    ),
    # ------------------------------------------------------------------------------------------- failures and time-outs
    "time-out-ignored": EngineFault(
        f"{_GROUPS}/deadlines.rs",
        "let late = self.ops.iter().filter(|(_, active)| now.since(active.started) > active.timeout);",
        "let late = self.ops.iter().filter(|(_, active)| now.since(active.started) / 9 > active.timeout);",
        "operations wait nine times too long",
    ),
    "time-out-of-held-ignored": EngineFault(
        f"{_GROUPS}/deadlines.rs",
        "now.since(waiting.since) > waiting.call.timeout",
        "now.since(waiting.since) / 9 > waiting.call.timeout",
        "operations whose tensors are not ready wait nine times too long",
    ),
    "failure-not-told": EngineFault(
        f"{_GROUPS}/failure.rs",
        "        if tell {\n",
        "        if tell && false {\n",
        "a rank whose group fails does not tell the others",
    ),
    "failure-passes-held-over": EngineFault(
        f"{_GROUPS}/failure.rs",
        "self.held.extract_if(|op, _| is_in(op)).collect()",
        "self.held.extract_if(|op, _| is_in(op) && false).collect()",
        "operations that are held do not fail with their group",
    ),
    "close-fails-what-has-ended-here": EngineFault(
        f"{_GROUPS}/failure.rs",
        "let finished = if failure.kind == FailureKind::Closed { self.finished(scope) } else { Counts::default() };",
        "let finished = Counts::default();",
        "a rank that leaves takes collectives away from others that it has ended",
        expected="where a rank leaves, its group may fail",
        test=Test("penstock-engine", "virtual_time::a_collective_that_one_rank_has_ended_ends_on_all"),
    ),
    "end-waits-for-nothing": EngineFault(
        f"{_GROUPS}/failure.rs",
        "        if self.have_ended(&counts) {\n",
        "        if true || self.have_ended(&counts) {\n",
        "a rank's end fails collectives at once that still can end",
        expected="where a rank leaves, its group may fail",
        test=Test("penstock-engine", "virtual_time::a_collective_that_one_rank_has_ended_ends_on_all"),
    ),
    "second-end-ignored": EngineFault(
        f"{_GROUPS}/failure.rs",
        "        if lowest != ending.counts.0 {\n",
        "        if false && lowest != ending.counts.0 {\n",
        "of two ranks that end, only the first counts",
        expected="it takes two ranks that leave in the middle of different collectives, and in a program only one does",
        test=Test("penstock-engine", "virtual_time::the_first_collective_that_somebody_has_not_ended_ends_the_group"),
    ),
    # ------------------------------------------------------------------------------------------------ ranks that leave
    "taken-messages-of-the-gone-count-as-lost": EngineFault(
        f"{_GROUPS}/departure.rs",
        "common.directory.peer(peer).lost.is_none() && !host.look(peer).needs_the_peer(&key(message))",
        "false",
        "an operation fails whose acknowledgement comes after its receiver's farewell",
    ),
    "early-messages-of-the-gone-count-as-lost": EngineFault(
        f"{_GROUPS}/departure.rs",
        "Awaited::Message(message) => common.early.has_bytes(peer, key(message)),",
        "Awaited::Message(_) => false,",
        "an operation fails although all that it needs of a rank that has left is here",
    ),
    "farewell-overtakes-data": EngineFault(
        f"{_PEER}/ending.rs",
        "        match ahead {\n",
        "        match 0 * ahead {\n",
        "the word of having left overtakes data",
        expected="it hides a disagreement that nobody waits for any more",
        test=Test("penstock-stream", "peer::tests::life::leaving_overtakes_nothing"),
    ),
    "good-bye-overtakes": EngineFault(
        f"{_PEER}/ending.rs",
        "        self.undelivered().next().is_none() && !self.controls.frames.values().any(is_report)\n",
        "        true || !self.controls.frames.values().any(is_report)\n",
        "a good-bye does not wait for frames",
        expected="a stream must be lost within the last milliseconds",
        test=Test("penstock-stream", "peer::tests::streams::empty_messages_are_to_be_delivered"),
    ),
    "good-bye-acknowledged-while-frames-wait": EngineFault(
        f"{_PEER}/receive.rs",
        "let has_frames_out = header.kind == Kind::Bye && self.has_frames_out();",
        "let has_frames_out = false;",
        "a good-bye is acknowledged while frames wait",
        seed=538_000,
        expected="a stream must be lost within the last milliseconds",
        test=Test("penstock-stream", "peer::tests::streams::a_good_bye_waits_for_lost_acknowledgements"),
    ),
    "acknowledgements-do-not-leave-before-the-end": EngineFault(
        "penstock-net/src/driver/ending.rs",
        "machine.is_quiet() && !machine.owes_acks() && self.is_flushed(connections)",
        "machine.is_quiet() && self.is_flushed(connections)",
        "a rank ends with acknowledgements that it has not sent",
        expected="no effect: the loop has written what it can before it looks, and a stream that takes no more is not flushed",
    ),
    "good-bye-ignored": EngineFault(
        "penstock-net/src/driver.rs",
        "Event::Bye => self.connections[peer as usize].said_bye = true,",
        "Event::Bye => {}",
        "a rank that has left the job counts as lost",
    ),
    "operations-not-retired": EngineFault(
        f"{_GROUPS}/progress.rs",
        "            host.machine(peer).retire(self.id, space, seq);\n",
        "            let _ = (&host, peer, space, seq);\n",
        "what is remembered of an operation stays after its end",
    ),
    "report-of-a-later-group-forgotten": EngineFault(
        f"{_GROUPS}/events.rs",
        "            self.common.unjoined.reported.remember(id, failure);\n",
        "            let _ = failure;\n",
        "the report of a group that is joined later is forgotten",
        expected="ranks then wait for a time-out, which is allowed where a rank leaves",
        test=Test("penstock-engine", "messages_that_the_end_of_their_group_has_overtaken", "unauthenticated"),
    ),
    "end-of-a-later-group-forgotten": EngineFault(
        f"{_GROUPS}/departure.rs",
        "            self.unjoined.overtaken.remember(peer, id);\n",
        "",
        "the end of a group that is joined later is forgotten",
        expected="it keeps messages that the end has overtaken, where a join has failed; what is held is not looked at there",
        test=Test("penstock-engine", "messages_that_the_end_of_their_group_has_overtaken", "unauthenticated"),
    ),
    "join-with-the-dead-waits": EngineFault(
        f"{_GROUPS}/events.rs",
        "self.common.directory.is_lost(peer, reason, has_died);",
        "self.common.directory.is_lost(peer, reason, has_died && false);",
        "a join with a process that has died does not fail at once",
        seed=3_001_800,
        expected="it takes a rank that joins with one that has died while a third waits for it elsewhere",
        test=Test("penstock-engine", "virtual_time::a_join_with_a_rank_that_has_died_fails_at_once"),
    ),
    # -------------------------------------------------------------------------------------------- claims of I/O threads
    "copies-do-not-wait-for-a-claim": EngineFault(
        f"{_DRIVER}/turn.rs",
        "            if driver.peers.claims.lands(peer, &header.key, header.offset) {\n",
        "            if false && driver.peers.claims.lands(peer, &header.key, header.offset) {\n",
        "a copy of a frame is used while another thread uses one",
        expected=_STANDS_STILL,
        test=_STANDING,
    ),
    "claim-of-a-lost-stream-not-held": EngineFault(
        f"{_DRIVER}/gone.rs",
        "            if let Some((key, offset)) = landing {\n",
        "            if let Some((key, offset)) = landing.filter(|_| false) {\n",
        "a frame's place is given to another stream while the reader of one that was lost touches it",
        expected=_STANDS_STILL,
        test=_STANDING,
    ),
    "claim-of-a-lost-stream-counts-on-the-next": EngineFault(
        f"{_DRIVER}/turn.rs",
        "let stream = if self.give_back_reader(token, reader) { stream } else { LOST_STREAM };",
        "let _ = (self.give_back_reader(token, reader), LOST_STREAM);",
        "a frame that was used when its stream was lost counts as one of the stream that came in its place",
        expected=_STANDS_STILL,
        test=_STANDING,
    ),
    "peer-gone-while-claimed": EngineFault(
        f"{_DRIVER}/gone.rs",
        "position(|gone| !self.peers.claims.concern(gone.peer))",
        "position(|gone| true || self.peers.claims.concern(gone.peer))",
        "a peer is gone while a thread has a claim on a stream of it",
        expected=_STANDS_STILL,
        test=_STANDING,
    ),
    "groups-fail-while-claimed": EngineFault(
        f"{_DRIVER}/timers.rs",
        "Order::Then(act) => self.peers.claims.after_drops(act),",
        "Order::Then(act) => act(),",
        "callers have the memory of a group that has failed back while threads have claims on it",
        expected=_STANDS_STILL,
        test=_STANDING,
    ),
    "claims-in-a-group-that-has-failed-not-let-go": EngineFault(
        f"{_DRIVER}/timers.rs",
        "                    self.peers.claims.drop_all(scope, source);\n",
        "                    drop(source);\n",
        "a thread that comes back into a group that has failed goes on in its memory",
        expected=_STANDS_STILL,
        test=_STANDING,
    ),
    "operations-end-while-claimed": EngineFault(
        "penstock-net/src/claims.rs",
        "            true => self.ended.push((*op, Box::new(act))),\n",
        "            true => act(),\n",
        "callers have the memory of an operation back while threads have claims on it",
        expected="what is read too late is a copy that its receiver discards",
        test=Test("penstock-net", "claims::tests::ends_wait_for_claims"),
    ),
    # -------------------------------------------------------------------------------------------------------- channels
    "channel-ignored-where-frames-arrive": EngineFault(
        "penstock-stream/src/frame.rs",
        "(0, 0, tag) => Ok(NumberSpace::Collective(ChannelId(tag))),",
        "(0, 0, _) => Ok(NumberSpace::Collective(ChannelId::MAIN)),",
        "frames of a channel are taken for those of its group",
        seed=4_000_000,
    ),
    "close-keeps-early-messages": EngineFault(
        f"{_GROUPS}/channels.rs",
        "        common.forget_early(host, scope);\n",
        "",
        "a close keeps messages that came early for the channel",
        seed=4_000_000,
    ),
    "close-drops-messages-of-other-channels": EngineFault(
        "penstock-core/src/early.rs",
        "self.forget(|_, key| key.is_in(scope))",
        "self.forget(|_, key| key.group == scope.group)",
        "a close drops messages that came early for other channels",
        seed=4_000_000,
    ),
    "closed-channel-forgotten": EngineFault(
        f"{_GROUPS}/channels.rs",
        "        self.closed.insert(u64::from(channel.0)..u64::from(channel.0) + 1);\n",
        "",
        "frames of a channel that was closed here wait for its opening",
        seed=4_000_000,
    ),
    "vigil-not-told": EngineFault(
        f"{_GROUPS}/departure.rs",
        "            self.check_vigil(common, host, channel);\n",
        "            let _ = channel;\n",
        "a vigil goes on when a rank has closed it",
        seed=4_000_000,
    ),
    "departure-by-the-main-channel": EngineFault(
        f"{_GROUPS}/departure.rs",
        "let of_channel = farewell(op.channel);",
        "let of_channel = farewell(ChannelId::MAIN).or_else(|| farewell(op.channel));",
        "a rank that has left is judged by its number of collectives in the main channel",
        seed=4_000_000,
    ),
    "close-fails-the-group": EngineFault(
        f"{_GROUPS}/departure.rs",
        "(!comes).then(|| (self.has_only_closed(peer, op.channel), self",
        "(!comes).then(|| (false, self",
        "what needs a rank in a channel that this has closed fails the group",
        seed=4_000_000,
    ),
    # -------------------------------------------------------------------------------------------------------- urgency
    "usual-frames-first": EngineFault(
        f"{_PEER}/send.rs",
        "let first = self.outbox.ready.first();",
        "let first = self.outbox.ready.last();",
        "what is least urgent leaves first",
        expected=_ORDER,
        test=Test("penstock-stream", "peer::tests::rates::urgent_messages_overtake_at_frames"),
    ),
    "no-stream-left-free": EngineFault(
        f"{_PEER}/urgency.rs",
        "(now < self.urgency.here && self.can_have_express() && is_well).then_some(*id)",
        "(now < self.urgency.here && self.can_have_express() && is_well && false).then_some(*id)",
        "no stream is left free for what is urgent",
        expected=_ORDER,
        test=Test("penstock-stream", "peer::tests::streams::urgency_keeps_a_stream_free_and_holds_the_rest"),
    ),
    "claims-not-obeyed": EngineFault(
        f"{_PEER}/urgency.rs",
        "let is_held = now < self.urgency.held && !self.config.descriptors;",
        "let is_held = false && now < self.urgency.held && !self.config.descriptors;",
        "bulk leaves while another process of the host is urgent",
        expected=_ORDER,
        test=Test("penstock-stream", "peer::tests::streams::urgency_keeps_a_stream_free_and_holds_the_rest"),
    ),
    "a-peer-that-stands-still-is-waited-for": EngineFault(
        f"{_PEER}/urgency.rs",
        "waiting.peek().is_none() || waiting.any(|stream| stream.silence(now) < SILENT)",
        "waiting.peek().is_none() || waiting.any(|stream| stream.silence(now) < 9 * SILENT * SILENT)",
        "bulk waits behind urgent messages to a peer that takes nothing",
        expected=_ORDER,
        test=Test("penstock-stream", "peer::tests::streams::unused_streams_do_not_tell_that_a_peer_is_well"),
    ),
    "pauses-not-obeyed": EngineFault(
        f"{_PEER}/urgency.rs",
        "self.pauses.least_urgent(now).filter(|_| !self.urgency.ignores_pauses);",
        "self.pauses.least_urgent(now).filter(|_| false);",
        "bulk leaves while its receiver takes what is urgent",
        expected=_ORDER,
        test=Test("penstock-stream", "peer::tests::pauses::a_pause_holds_what_is_less_urgent"),
    ),
    "pauses-of-any-length": EngineFault(
        f"{_PEER}/pauses.rs",
        "header.offset.min(PAUSE_MOST)",
        "header.offset",
        "a receiver can stop its senders for as long as it likes",
        expected=_ORDER,
        test=Test("penstock-stream", "peer::tests::pauses::pauses_end"),
    ),
    "pauses-for-short-messages": EngineFault(
        f"{_PEER}/pauses.rs",
        "priority.is_urgent() && header.total >= LONG && !is_topped",
        "priority.is_urgent() && !is_topped",
        "a receiver stops its senders for what has come already",
        expected=_ORDER,
        test=Test("penstock-stream", "peer::tests::pauses::who_brings_what_is_urgent"),
    ),
    "waiting-for-others-without-end": EngineFault(
        "penstock-net/src/arbiter.rs",
        "        if self.held > HELD_MOST {\n",
        "        if false && self.held > HELD_MOST {\n",
        "bulk waits for ever where others are always urgent",
        expected=_ORDER,
        test=Test("penstock-net", "driver::urgency::tests::claims_and_pauses_share_a_limit"),
    ),
    "waiting-for-own-threads-ends": EngineFault(
        f"{_DRIVER}/urgency.rs",
        "claimed.filter(|claim| claim.is_own || !has_waited_enough)",
        "claimed.filter(|_| !has_waited_enough)",
        "bulk has a fifth of the time while the same process has something urgent under way",
        expected=_ORDER,
        test=Test("penstock-net", "driver::urgency::tests::claims_and_pauses_share_a_limit"),
    ),
    "own-claims-obeyed": EngineFault(
        "penstock-net/src/arbiter.rs",
        "        if word & OWNERS == self.own {\n",
        "        if false && word & OWNERS == self.own {\n",
        "a process gives way to itself",
        expected=_ORDER,
        test=Test("penstock-net", "arbiter::tests::claims_end_by_themselves"),
    ),
    "peers-served-in-any-order": EngineFault(
        "penstock-net/src/handler.rs",
        "        taken.sort_by_key(|peer| std::cmp::Reverse(self.look(*peer).most_urgent()));\n",
        "",
        "the peer that was touched last is served first",
        expected=_ORDER,
        test=Test("penstock-net", "driver::urgency::tests::the_most_urgent_peer_has_the_first_turn"),
    ),
    "bulk-shares-the-way-of-what-is-urgent": EngineFault(
        f"{_DRIVER}/urgency.rs",
        "        if !is_stopping && is_blocked(self.peers.look(peer), now) {\n",
        "        if false && !is_stopping && is_blocked(self.peers.look(peer), now) {\n",
        "bulk leaves for other ranks while something urgent waits for room",
        expected=_ORDER,
        test=Test("penstock-engine", "virtual_time::bulk_between_other_ranks_gives_way"),
    ),
    "others-not-asked-to-pause": EngineFault(
        f"{_DRIVER}/urgency.rs",
        "        self.pause_others();\n",
        "",
        "bulk of other ranks shares the receiver's link with what is urgent",
        expected=_ORDER,
        test=Test("penstock-engine", "virtual_time::bulk_between_other_ranks_gives_way"),
    ),
    "blocks-leave-while-they-are-held": EngineFault(
        "penstock-aggregation/src/worker.rs",
        "let granted = granted && now >= self.held;",
        "let granted = granted && (now >= self.held || true);",
        "blocks of bulk leave through aggregators while others are urgent",
        expected=_ORDER,
        test=Test("penstock-aggregation", "worker::tests::held"),
    ),
    # ------------------------------------------------------------------------------------------------------ endpoints
    "slot-of-two-calls": EngineFault(
        f"{_ENDPOINT}/server.rs",
        "if slot >= limits.calls || session.busy.contains(&slot) {",
        "if slot >= limits.calls {",
        "a client has more calls than the server takes, and bytes of two under one tag",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::hostile_tests::any_client"),
    ),
    "bodies-beyond-the-limit": EngineFault(
        f"{_ENDPOINT}/server.rs",
        "if session.held.saturating_add(session.calls[&id].body) > self.limits.in_flight {",
        "if session.calls[&id].body > self.limits.in_flight {",
        "a server holds as many bytes as a client likes",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::hostile_tests::any_client"),
    ),
    "withdrawn-but-handled": EngineFault(
        f"{_ENDPOINT}/server.rs",
        "                self.ready.remove(&turn);\n                self.release_body(client, id);\n",
        "                let _ = turn;\n                self.release_body(client, id);\n",
        "a handler has a call that was withdrawn",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::tests::calls_end_once_and_as_seen"),
    ),
    "calls-of-the-lost-are-handled": EngineFault(
        f"{_ENDPOINT}/server.rs",
        "        self.ready.retain(|(_, _, of, _)| *of != client);\n",
        "",
        "a handler has a call of a client that is gone",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::hostile_tests::any_client"),
    ),
    "withdrawn-not-confirmed": EngineFault(
        f"{_ENDPOINT}/server.rs",
        "let is_promised = matches!(stage, Stage::Arrives { .. }) && called.body > INLINE;",
        "let is_promised = false && matches!(stage, Stage::Arrives { .. }) && called.body > INLINE;",
        "a client never hears that the place of a body that it withdrew is to be filled, and its slot is lost",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::tests::calls_end_once_and_as_seen"),
    ),
    "ended-while-it-is-read": EngineFault(
        f"{_ENDPOINT}/client.rs",
        "let leaves = self.body == Transfer::Runs && self.ask.body > INLINE;",
        "let leaves = false && self.body == Transfer::Runs && self.ask.body > INLINE;",
        "a caller has its memory back while it is sent",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::hostile_tests::any_server"),
    ),
    "zeros-before-they-are-awaited": EngineFault(
        f"{_ENDPOINT}/client.rs",
        "        if !call.is_abandoned {\n            self.transmit(number);\n",
        "        if !call.is_abandoned || true {\n            self.transmit(number);\n",
        "a handler may have zeros for the body of a call that was withdrawn",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::tests::calls_end_once_and_as_seen"),
    ),
    "second-reply-taken": EngineFault(
        f"{_ENDPOINT}/client.rs",
        "if call.outcome.is_some() || (outcome == Outcome::Done",
        "if (outcome == Outcome::Done",
        "a server's second reply to a call is written over the first",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::hostile_tests::any_server"),
    ),
    "priority-of-a-call-kept": EngineFault(
        f"{_ENDPOINT}/client.rs",
        "            self.queue.insert((priority, call));\n        } else if",
        "            self.queue.insert((before, call));\n        } else if",
        "a call that waits at its client cannot be made more urgent",
        expected=_NO_ENDPOINTS,
        test=Test("penstock-core", "endpoint::tests::a_call_gets_another_priority"),
    ),
}

# Programs that are run in search of a fault, at most.
PROGRAMS = 5_000
