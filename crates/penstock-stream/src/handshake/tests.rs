//! A stream is trusted after the whole hand-shake with the right secret, and after nothing else.

use super::*;
use proptest::prelude::*;

fn hello() -> Hello {
    Hello {
        version: (VERSION_MAJOR, VERSION_MINOR),
        features: 0b111,
        job: GroupId(42),
        generation: Generation(1),
        rank: 3,
        from: [1; 16],
        to: [2; 16],
        stream: 5,
        nonce: [7; 32],
    }
}

/// Runs both sides, `cut` bytes at a time.
fn run(hello: Hello, ours: &[u8], theirs: &[u8], cut: usize) -> Result<(Accepted, u32), HandshakeError> {
    let mut connector = Connector::new(hello, ours);
    let mut acceptor = Acceptor::new([9; 32], 0b110);
    let mut rest = Vec::new();
    let (mut accepted, mut features) = (Accepted::Pending, None);
    for _ in 0..10 {
        for piece in connector.poll_transmit().chunks(cut) {
            match acceptor.handle_input(piece, &mut rest) {
                Ok(Accepted::Decide(_)) => acceptor.admit(theirs),
                Ok(Accepted::Pending) => {}
                Ok(done) => accepted = done,
                Err(error) => {
                    let refusal = acceptor.poll_transmit();
                    if !refusal.is_empty() {
                        return Err(connector.handle_input(&refusal, &mut rest).expect_err("refused"));
                    }
                    return Err(error);
                }
            }
        }
        for piece in acceptor.poll_transmit().chunks(cut) {
            match connector.handle_input(piece, &mut rest) {
                Ok(done) => features = features.or(done),
                Err(error) => {
                    let told = acceptor.handle_input(&connector.poll_transmit(), &mut rest).expect_err("refused");
                    let HandshakeError::Refused { reason, .. } = told else { panic!("not a refusal: {told}") };
                    assert_eq!(reason, error.to_string());
                    return Err(error);
                }
            }
        }
        if let Some(features) = features {
            return Ok((accepted, features));
        }
    }
    panic!("the hand-shake does not end");
}

/// Two nodes with one secret meet, however the bytes are cut, and agree on the features that both have.
#[test]
fn same_secret_is_welcome() {
    for cut in [1, 3, 7, 100, 1000] {
        let (accepted, features) = run(hello(), b"secret", b"secret", cut).expect("welcome");
        assert_eq!(features, 0b110);
        assert_eq!(accepted, Accepted::Welcome { hello: hello(), features: 0b110 });
    }
}

/// Another secret is found by the connector first, which then says nothing that depends on its own, but tells the
/// acceptor why it goes.
#[test]
fn other_secret_is_refused() {
    assert_eq!(run(hello(), b"secret", b"other", 1000), Err(HandshakeError::Secret));
}

/// Another major version is refused with both versions in the text.
#[test]
fn other_version_is_refused() {
    let mut old = hello();
    old.version = (VERSION_MAJOR + 1, 0);
    let error = run(old, b"secret", b"secret", 1000).expect_err("refused");
    let HandshakeError::Refused { code, reason } = error else { panic!("not a refusal: {error}") };
    assert_eq!(code, RefusalCode::Version as u8);
    assert!(reason.contains(&format!("theirs is {}.0", VERSION_MAJOR + 1)), "{reason}");
}

/// A proof recorded on one stream does not open another: the acceptor's nonce differs.
#[test]
fn a_replayed_proof_is_refused() {
    let mut connector = Connector::new(hello(), b"secret");
    let first = connector.poll_transmit();
    let mut rest = Vec::new();
    let mut acceptor = Acceptor::new([1; 32], 0);
    acceptor.handle_input(&first, &mut rest).expect("hello");
    acceptor.admit(b"secret");
    connector.handle_input(&acceptor.poll_transmit(), &mut rest).expect("challenge");
    let second = connector.poll_transmit();

    let mut victim = Acceptor::new([2; 32], 0);
    victim.handle_input(&first, &mut rest).expect("hello");
    victim.admit(b"secret");
    assert_eq!(victim.handle_input(&second, &mut rest), Err(HandshakeError::Secret));
}

/// Both sides up to the end, with every message through `wire`. Returns whether each side was welcome, and the
/// features that it believes in.
fn meet(mut wire: impl FnMut(usize, Vec<u8>) -> Vec<u8>) -> [Option<u32>; 2] {
    let mut connector = Connector::new(hello(), b"secret");
    let mut acceptor = Acceptor::new([9; 32], 0b110);
    let (mut rest, mut ends) = (Vec::new(), [None, None]);
    for round in 0..2 {
        match acceptor.handle_input(&wire(2 * round, connector.poll_transmit()), &mut rest) {
            Ok(Accepted::Decide(_)) => acceptor.admit(b"secret"),
            Ok(Accepted::Welcome { features, .. }) => ends[1] = Some(features),
            Ok(Accepted::Pending) | Err(_) => {}
        }
        if let Ok(done) = connector.handle_input(&wire(2 * round + 1, acceptor.poll_transmit()), &mut rest) {
            ends[0] = done;
        }
    }
    ends
}

/// Whatever bit flips on the way, the two never both believe in a stream: each has proved what it heard.
#[test]
fn every_flipped_bit_is_noticed() {
    let mut lengths = Vec::new();
    let ends = meet(|_, bytes| {
        lengths.push(bytes.len());
        bytes
    });
    assert_eq!(ends, [Some(0b110), Some(0b110)]);
    for (at, length) in lengths.into_iter().enumerate() {
        for bit in 0..8 * length {
            let ends = meet(|step, mut bytes| {
                if step == at && bit / 8 < bytes.len() {
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
                bytes
            });
            assert!(ends.contains(&None), "bit {bit} of message {at}: {ends:?}");
        }
    }
}

/// A newer minor version may say more in HELLO and CHALLENGE: it is skipped, and proved all the same.
#[test]
fn newer_minor_versions_may_say_more() {
    let mut more = hello().encode();
    more[9] += 1;
    more.extend(b"something new");
    let mut acceptor = Acceptor::new([9; 32], 0b110);
    let mut rest = Vec::new();
    let decide = acceptor.handle_input(&message(Tag::Hello, &more), &mut rest).expect("hello");
    let Accepted::Decide(found) = decide else { panic!("{decide:?}") };
    assert_eq!(found, Hello { version: (VERSION_MAJOR, VERSION_MINOR + 1), ..hello() });
    acceptor.admit(b"secret");
    let challenge = acceptor.poll_transmit();
    let covered = &challenge[3..challenge.len() - 32];
    assert_eq!(challenge[challenge.len() - 32..], proof(b"secret", b"acceptor", &more, covered));
    let answer = message(Tag::Proof, &proof(b"secret", b"connector", &more, covered));
    let accepted = acceptor.handle_input(&answer, &mut rest).expect("proved");
    assert!(matches!(accepted, Accepted::Welcome { .. }), "{accepted:?}");

    let mut connector = Connector::new(hello(), b"secret");
    let said = connector.poll_transmit();
    let mut challenge = vec![VERSION_MAJOR, VERSION_MINOR + 1, 0b11, 0, 0, 0];
    challenge.extend([3; 32]);
    challenge.extend(b"something new");
    let expected = message(Tag::Proof, &proof(b"secret", b"connector", &said[3..], &challenge));
    challenge.extend(proof(b"secret", b"acceptor", &said[3..], &challenge));
    assert_eq!(connector.handle_input(&message(Tag::Challenge, &challenge), &mut rest), Ok(None));
    assert_eq!(connector.poll_transmit(), expected);
    assert_eq!(connector.handle_input(&message(Tag::Welcome, &[]), &mut rest), Ok(Some(0b11)));
}

/// Another major version is named as such, whatever follows it, by both sides.
#[test]
fn other_versions_may_look_different() {
    let mut rest = Vec::new();
    let mut acceptor = Acceptor::new([9; 32], 0);
    let mut short = HANDSHAKE_MAGIC.to_vec();
    short.extend([VERSION_MAJOR + 1, 4]);
    let theirs = (VERSION_MAJOR + 1, 4);
    let error = acceptor.handle_input(&message(Tag::Hello, &short), &mut rest);
    assert_eq!(error, Err(HandshakeError::Version { theirs }));
    let refusal = acceptor.poll_transmit();
    let mut connector = Connector::new(hello(), b"secret");
    assert!(matches!(connector.handle_input(&refusal, &mut rest), Err(HandshakeError::Refused { code: 1, .. })));

    let mut connector = Connector::new(hello(), b"secret");
    let challenge = message(Tag::Challenge, &[VERSION_MAJOR + 1, 4]);
    connector.poll_transmit();
    assert_eq!(connector.handle_input(&challenge, &mut rest), Err(HandshakeError::Version { theirs }));

    let mut acceptor = Acceptor::new([9; 32], 0);
    acceptor.handle_input(&message(Tag::Hello, &hello().encode()), &mut rest).expect("hello");
    acceptor.admit(b"secret");
    let told = acceptor.handle_input(&connector.poll_transmit(), &mut rest).expect_err("refused");
    let HandshakeError::Refused { code, reason } = told else { panic!("not a refusal: {told}") };
    assert_eq!(code, RefusalCode::Version as u8);
    let expected = format!("theirs is {}.4, ours {VERSION_MAJOR}.", VERSION_MAJOR + 1);
    assert!(reason.contains(&expected), "{reason}");
}

/// A refusal says why at any time, in printable characters only, and only one kind is worth another attempt.
#[test]
fn refusals_say_why() {
    for (code, temporary) in [
        (RefusalCode::Unauthenticated, false),
        (RefusalCode::Generation, false),
        (RefusalCode::NotYet, true),
        (RefusalCode::Lost, false),
    ] {
        let mut acceptor = Acceptor::new([9; 32], 0);
        acceptor.refuse(code, "because\x1b[31m of \u{e4}");
        let mut connector = Connector::new(hello(), b"secret");
        let error = connector.handle_input(&acceptor.poll_transmit(), &mut Vec::new()).expect_err("refused");
        assert_eq!(error, HandshakeError::Refused { code: code as u8, reason: "because[31m of \u{e4}".into() });
        assert_eq!(error.is_temporary(), temporary);
        let lost = (code == RefusalCode::Lost).then_some("because[31m of \u{e4}");
        assert_eq!(error.lost(), lost);
    }
}

/// A proof is of the parts as they are cut: bytes that wander from one to the next make another.
#[test]
fn a_proof_knows_where_its_parts_end() {
    let whole = proof(b"secret", b"acceptor", b"hello", b"challenge");
    for (hello, challenge) in [(&b"hell"[..], &b"ochallenge"[..]), (b"helloc", b"hallenge"), (b"", b"hellochallenge")] {
        assert_ne!(proof(b"secret", b"acceptor", hello, challenge), whole);
    }
    assert_ne!(proof(b"secret", b"accept", b"orhello", b"challenge"), whole);
}

/// Rejects a reflected proof: each role signs with its own label.
#[test]
fn a_reflected_proof_is_refused() {
    let mut acceptor = Acceptor::new([1; 32], 0);
    let mut rest = Vec::new();
    acceptor.handle_input(&message(Tag::Hello, &hello().encode()), &mut rest).expect("hello");
    acceptor.admit(b"secret");
    let challenge = acceptor.poll_transmit();
    let reflected = message(Tag::Proof, &challenge[challenge.len() - 32..]);
    assert_eq!(acceptor.handle_input(&reflected, &mut rest), Err(HandshakeError::Secret));
}

proptest! {
    /// No bytes from whoever listens there panic the connector, make it hold more than a bound, or convince it.
    #[test]
    fn impostors_are_bounded(bytes in proptest::collection::vec(any::<u8>(), 0..4096), cut in 1usize..600, tag in 1u8..6) {
        let mut connector = Connector::new(hello(), b"secret");
        let mut rest = Vec::new();
        let claim = message(Tag::Challenge, &[&[VERSION_MAJOR, 0][..], &bytes[..bytes.len().min(100)]].concat());
        let lead = if tag == 2 { claim } else { vec![tag] };
        for piece in [&lead[..], &bytes[..]].concat().chunks(cut) {
            match connector.handle_input(piece, &mut rest) {
                Ok(done) => prop_assert_eq!(done, None),
                Err(_) => break,
            }
            prop_assert!(connector.inbox.bytes.len() <= MAX_MESSAGE_BYTES + 3);
        }
    }

    /// No bytes from an unauthenticated peer panic the acceptor or make it hold more than a bound.
    #[test]
    fn unauthenticated_peers_are_bounded(bytes in proptest::collection::vec(any::<u8>(), 0..4096), cut in 1usize..600) {
        let mut acceptor = Acceptor::new([0; 32], 0);
        let mut rest = Vec::new();
        for piece in bytes.chunks(cut) {
            if acceptor.handle_input(piece, &mut rest).is_err() {
                break;
            }
            prop_assert!(acceptor.inbox.bytes.len() <= 2 * MAX_MESSAGE_BYTES + 600);
        }
    }
}
