//! The hand-shake by which two nodes authenticate a stream.
//!
//! ```text
//!   connector                                   acceptor
//!     HELLO  version, features, job, generation,
//!            who I am, whom I want, stream, nonce  ->
//!                                             <-  CHALLENGE  version, features, nonce, proof of the secret
//!     PROOF  of the secret                     ->
//!                                             <-  WELCOME
//! ```
//! Either side may send REFUSAL (code, text) instead and close.
//!
//! A proof is HMAC-SHA256(secret, role
//! HELLO
//! CHALLENGE without its proof), over the bytes as they were sent. Each part follows its length (8 bytes, little endian), so
//! no two hand-shakes give the same input. The proofs show that both sides know the job's secret, for this very stream, and
//! that both saw the same messages. Before that, only these messages are parsed, of at most [`MAX_MESSAGE_BYTES`]. Later bytes
//! are neither encrypted nor authenticated: the secret keeps out unauthenticated peers and misrouted ranks, not an attacker
//! who can alter packets in flight (docs/reference/security.md).
//!
//! Each message is `kind (1) | length (2) | body`.

use crate::frame::{VERSION_MAJOR, VERSION_MINOR};
use hmac::{Hmac, Mac};
use penstock_types::{Generation, GroupId};
use sha2::Sha256;

/// Names one process: drawn at random when its engine starts.
pub type NodeKey = [u8; 16];

/// The connector's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Protocol version, major and minor.
    pub version: (u8, u8),
    /// Feature bits that the connector can use.
    pub features: u32,
    /// The job: the group whose secret both share.
    pub job: GroupId,
    /// The job's generation.
    pub generation: Generation,
    /// The connector's rank in the job, for messages.
    pub rank: u32,
    /// The connector's process.
    pub from: NodeKey,
    /// The process that the connector wants to reach: another one may have taken over the port.
    pub to: NodeKey,
    /// Which of the pair's streams this is.
    pub stream: u16,
    /// Fresh randomness.
    pub nonce: [u8; 32],
}

/// The connector's state machine: feed it received bytes and send its output until it is finished.
#[derive(Debug)]
pub struct Connector {
    hello: Hello,
    secret: Vec<u8>,
    inbox: Inbox,
    outbox: Vec<u8>,
    features: Option<u32>,
}

impl Connector {
    /// Creates a connector whose first output is the HELLO.
    #[must_use]
    pub fn new(hello: Hello, secret: &[u8]) -> Connector {
        let outbox = message(Tag::Hello, &hello.encode());
        Connector { hello, secret: secret.to_vec(), inbox: Inbox::default(), outbox, features: None }
    }

    /// Bytes to write now.
    pub fn poll_transmit(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outbox)
    }

    /// Whether the acceptor has admitted this side, which answers with the PROOF.
    #[must_use]
    pub fn is_challenged(&self) -> bool {
        self.features.is_some()
    }

    /// Takes bytes from the wire. Returns `Ok(Some(features))` once the acceptor has welcomed this side; bytes after the
    /// WELCOME are in `rest`. After an error, write the outbox, which may say why, then close.
    pub fn handle_input(&mut self, bytes: &[u8], rest: &mut Vec<u8>) -> Result<Option<u32>, HandshakeError> {
        self.inbox.bytes.extend_from_slice(bytes);
        while let Some((tag, body)) = self.inbox.next()? {
            match (tag, self.features) {
                (Tag::Challenge, None) => {
                    let challenge = Challenge::decode(&body).inspect_err(|error| {
                        if matches!(error, HandshakeError::Version { .. }) {
                            self.outbox.extend(refusal(RefusalCode::Version, &error.to_string()));
                        }
                    })?;
                    let hello = self.hello.encode();
                    let expected = proof(&self.secret, b"acceptor", &hello, challenge.proven(&body));
                    if !equal(&expected, &challenge.proof) {
                        self.outbox.extend(refusal(RefusalCode::Secret, &HandshakeError::Secret.to_string()));
                        return Err(HandshakeError::Secret);
                    }
                    self.features = Some(challenge.features & self.hello.features);
                    let proof = proof(&self.secret, b"connector", &hello, challenge.proven(&body));
                    self.outbox.extend(message(Tag::Proof, &proof));
                }
                (Tag::Welcome, Some(features)) => {
                    rest.append(&mut self.inbox.bytes);
                    return Ok(Some(features));
                }
                (Tag::Refusal, _) => return Err(refused(&body)),
                _ => return Err(HandshakeError::Garbage("a hand-shake message out of turn")),
            }
        }
        Ok(None)
    }
}

/// The acceptor's state machine.
#[derive(Debug)]
pub struct Acceptor {
    nonce: [u8; 32],
    features: u32,
    inbox: Inbox,
    outbox: Vec<u8>,
    state: AcceptorState,
}

#[derive(Debug)]
enum AcceptorState {
    AwaitHello,
    /// With the bytes of the HELLO.
    Decide(Hello, Vec<u8>),
    AwaitProof {
        hello: Hello,
        expected: [u8; 32],
    },
    Finished,
}

/// What the acceptor knows after some input.
#[derive(Debug, PartialEq, Eq)]
pub enum Accepted {
    /// Not finished; feed more bytes.
    Pending,
    /// A HELLO is here: look up the job and call [`Acceptor::admit`] or [`Acceptor::refuse`].
    Decide(Hello),
    /// The stream is trusted.
    Welcome {
        /// The connector's HELLO.
        hello: Hello,
        /// Features that both sides have.
        features: u32,
    },
}

impl Acceptor {
    /// Creates an acceptor that waits for a HELLO; `nonce` is fresh randomness.
    #[must_use]
    pub fn new(nonce: [u8; 32], features: u32) -> Acceptor {
        Acceptor { nonce, features, inbox: Inbox::default(), outbox: Vec::new(), state: AcceptorState::AwaitHello }
    }

    /// Bytes to write now.
    pub fn poll_transmit(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outbox)
    }

    /// Takes bytes from the wire; bytes behind the PROOF are in `rest`.
    pub fn handle_input(&mut self, bytes: &[u8], rest: &mut Vec<u8>) -> Result<Accepted, HandshakeError> {
        self.inbox.bytes.extend_from_slice(bytes);
        if self.inbox.bytes.len() > 2 * MAX_MESSAGE_BYTES && !matches!(self.state, AcceptorState::AwaitProof { .. }) {
            return Err(HandshakeError::Garbage("more bytes than a hand-shake has"));
        }
        match std::mem::replace(&mut self.state, AcceptorState::Finished) {
            AcceptorState::AwaitHello => match self.inbox.next()? {
                Some((Tag::Hello, body)) => {
                    let hello = Hello::decode(&body).inspect_err(|error| {
                        if matches!(error, HandshakeError::Version { .. }) {
                            self.refuse(RefusalCode::Version, &error.to_string());
                        }
                    })?;
                    self.state = AcceptorState::Decide(hello.clone(), body);
                    Ok(Accepted::Decide(hello))
                }
                Some(_) => Err(HandshakeError::Garbage("a hand-shake that does not start with HELLO")),
                None => {
                    self.state = AcceptorState::AwaitHello;
                    Ok(Accepted::Pending)
                }
            },
            AcceptorState::AwaitProof { hello, expected } => match self.inbox.next()? {
                Some((Tag::Proof, body)) => {
                    if !equal(&expected, &body) {
                        self.refuse(RefusalCode::Secret, &HandshakeError::Secret.to_string());
                        return Err(HandshakeError::Secret);
                    }
                    self.outbox.extend(message(Tag::Welcome, &[]));
                    rest.append(&mut self.inbox.bytes);
                    Ok(Accepted::Welcome { features: self.features & hello.features, hello })
                }
                Some((Tag::Refusal, body)) => Err(refused(&body)),
                Some(_) => Err(HandshakeError::Garbage("a hand-shake message out of turn")),
                None => {
                    self.state = AcceptorState::AwaitProof { hello, expected };
                    Ok(Accepted::Pending)
                }
            },
            state => {
                self.state = state;
                Ok(Accepted::Pending)
            }
        }
    }

    /// Offers further features on this connection, found after it was accepted.
    pub fn add_features(&mut self, features: u32) {
        self.features |= features;
    }

    /// The HELLO names a job that we run, with this secret: challenge the connector.
    pub fn admit(&mut self, secret: &[u8]) {
        let AcceptorState::Decide(hello, bytes) = std::mem::replace(&mut self.state, AcceptorState::Finished) else {
            return;
        };
        let mut challenge = vec![VERSION_MAJOR, VERSION_MINOR];
        challenge.extend(self.features.to_le_bytes());
        challenge.extend(self.nonce);
        let expected = proof(secret, b"connector", &bytes, &challenge);
        challenge.extend(proof(secret, b"acceptor", &bytes, &challenge));
        self.outbox.extend(message(Tag::Challenge, &challenge));
        self.state = AcceptorState::AwaitProof { hello, expected };
    }

    /// Tells the connector why not. Write the outbox, then close.
    pub fn refuse(&mut self, code: RefusalCode, reason: &str) {
        self.outbox.extend(refusal(code, reason));
        self.state = AcceptorState::Finished;
    }
}

/// Why a stream was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RefusalCode {
    /// Another major version.
    Version = 1,
    /// The secrets differ.
    Secret = 2,
    /// The peer is not authenticated for any job here: no such job, rank or process.
    Unauthenticated = 3,
    /// The right job in another generation.
    Generation = 4,
    /// The acceptor has not read the job's secret yet. Try again.
    NotYet = 5,
    /// The acceptor has lost the connecting process before, or was itself lost to that process and does not know it yet. The
    /// two cannot connect again.
    Lost = 6,
}

/// Why a hand-shake ended without a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// The bytes are not a hand-shake.
    Garbage(&'static str),
    /// The other side speaks another major version.
    Version {
        /// Theirs, major and minor.
        theirs: (u8, u8),
    },
    /// The other side does not know the job's secret (or knows another).
    Secret,
    /// The other side refused.
    Refused {
        /// The [`RefusalCode`], as it came.
        code: u8,
        /// The acceptor's text, for logs.
        reason: String,
    },
}

impl HandshakeError {
    /// Whether trying again can help.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        matches!(self, HandshakeError::Refused { code, .. } if *code == RefusalCode::NotYet as u8)
    }

    /// The other side's reason, if it knew this process before and does not take it back.
    #[must_use]
    pub fn lost(&self) -> Option<&str> {
        match self {
            HandshakeError::Refused { code, reason } if *code == RefusalCode::Lost as u8 => Some(reason),
            _ => None,
        }
    }
}

impl std::fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            HandshakeError::Garbage(what) => write!(f, "not a Penstock hand-shake: {what}"),
            HandshakeError::Version { theirs } => write!(
                f,
                "protocol versions differ: theirs is {}.{}, ours {VERSION_MAJOR}.{VERSION_MINOR}; install the same \
                 Penstock on every rank",
                theirs.0, theirs.1
            ),
            HandshakeError::Secret => write!(
                f,
                "the job secret does not match; set the same PENSTOCK_SECRET (or PENSTOCK_SECRET_FILE) on every rank"
            ),
            HandshakeError::Refused { reason, .. } => write!(f, "refused: {reason}"),
        }
    }
}

impl std::error::Error for HandshakeError {}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Hello::BYTES);
        out.extend(HANDSHAKE_MAGIC);
        out.extend([self.version.0, self.version.1]);
        out.extend(self.features.to_le_bytes());
        out.extend(self.job.0.to_le_bytes());
        out.extend(self.generation.0.to_le_bytes());
        out.extend(self.rank.to_le_bytes());
        out.extend(self.from);
        out.extend(self.to);
        out.extend(self.stream.to_le_bytes());
        out.extend(self.nonce);
        debug_assert_eq!(out.len(), Hello::BYTES);
        out
    }

    fn decode(body: &[u8]) -> Result<Hello, HandshakeError> {
        let mut body = Reader(body);
        if body.take::<8>()? != HANDSHAKE_MAGIC {
            return Err(HandshakeError::Garbage("no Penstock magic"));
        }
        let version = known_version(body.take()?)?;
        let hello = Hello {
            version,
            features: u32::from_le_bytes(body.take()?),
            job: GroupId(u64::from_le_bytes(body.take()?)),
            generation: Generation(u32::from_le_bytes(body.take()?)),
            rank: u32::from_le_bytes(body.take()?),
            from: body.take()?,
            to: body.take()?,
            stream: u16::from_le_bytes(body.take()?),
            nonce: body.take()?,
        };
        // A newer minor version may append fields; they are skipped.
        Ok(hello)
    }

    const BYTES: usize = 8 + 2 + 4 + 8 + 4 + 4 + 16 + 16 + 2 + 32;
}

/// `version (2) | features (4) | nonce (32) | whatever a newer minor version adds | proof (32)`.
struct Challenge {
    features: u32,
    proof: [u8; 32],
}

impl Challenge {
    fn decode(body: &[u8]) -> Result<Challenge, HandshakeError> {
        let mut body = Reader(body);
        known_version(body.take()?)?;
        let features = u32::from_le_bytes(body.take()?);
        body.take::<32>()?;
        let (_, proof) = body.0.split_last_chunk().ok_or(HandshakeError::Garbage("a message cut short"))?;
        Ok(Challenge { features, proof: *proof })
    }

    /// The part of the message that the proofs cover.
    fn proven<'a>(&self, body: &'a [u8]) -> &'a [u8] {
        &body[..body.len() - self.proof.len()]
    }
}

/// Reads the version before anything else: another major version may have anything after it.
fn known_version(version: [u8; 2]) -> Result<(u8, u8), HandshakeError> {
    let theirs = (version[0], version[1]);
    if theirs.0 == VERSION_MAJOR { Ok(theirs) } else { Err(HandshakeError::Version { theirs }) }
}

fn refusal(code: RefusalCode, reason: &str) -> Vec<u8> {
    let mut body = vec![code as u8];
    body.extend(reason.bytes().take(MAX_MESSAGE_BYTES - 8));
    message(Tag::Refusal, &body)
}

fn refused(body: &[u8]) -> HandshakeError {
    let (code, text) = body.split_first().map_or((0, &[][..]), |(code, text)| (*code, text));
    // The text comes from an unauthenticated peer: printable characters only.
    let reason = String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect();
    HandshakeError::Refused { code, reason }
}

fn proof(secret: &[u8], role: &[u8], hello: &[u8], challenge: &[u8]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of any length");
    for part in [role, hello, challenge] {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

/// Compares in a time that does not depend on where the first difference is.
fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0u8, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Tag {
    Hello = 1,
    Challenge = 2,
    Proof = 3,
    Welcome = 4,
    Refusal = 5,
}

fn message(tag: Tag, body: &[u8]) -> Vec<u8> {
    let mut out = vec![tag as u8];
    out.extend((body.len() as u16).to_le_bytes());
    out.extend(body);
    out
}

#[derive(Debug, Default)]
struct Inbox {
    bytes: Vec<u8>,
}

impl Inbox {
    fn next(&mut self) -> Result<Option<(Tag, Vec<u8>)>, HandshakeError> {
        let Some(&tag) = self.bytes.first() else { return Ok(None) };
        let tag = [Tag::Hello, Tag::Challenge, Tag::Proof, Tag::Welcome, Tag::Refusal]
            .into_iter()
            .find(|known| *known as u8 == tag)
            .ok_or(HandshakeError::Garbage("an unknown message"))?;
        if self.bytes.len() < 3 {
            return Ok(None);
        }
        let length = usize::from(u16::from_le_bytes([self.bytes[1], self.bytes[2]]));
        if length > MAX_MESSAGE_BYTES {
            return Err(HandshakeError::Garbage("a message longer than a hand-shake has"));
        }
        if self.bytes.len() < 3 + length {
            return Ok(None);
        }
        let body = self.bytes[3..3 + length].to_vec();
        self.bytes.drain(..3 + length);
        Ok(Some((tag, body)))
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], HandshakeError> {
        let (head, tail) = self.0.split_at_checked(N).ok_or(HandshakeError::Garbage("a message cut short"))?;
        self.0 = tail;
        Ok(head.try_into().expect("split at N"))
    }
}

const HANDSHAKE_MAGIC: [u8; 8] = *b"PENSTOCK";
/// No hand-shake message is longer, which bounds what an unauthenticated peer can make us hold.
pub const MAX_MESSAGE_BYTES: usize = 512;

#[cfg(test)]
mod tests;
