//! HTTP for a handful of requests a minute: one request a connection, every limit known before a byte is read.
//!
//! An unauthenticated peer can hold [`CONNECTIONS`] connections for [`PATIENCE`], and no packet of a job waits for any of them.
//! When all connections are taken, a new one replaces the oldest that is not being answered: peers that send nothing keep
//! nobody out.

use penstock_net::descriptors::{After, after_accept};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A request whose form is valid.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// The path with its query, as it was sent.
    pub(crate) path: String,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// An answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn json(status: u16, body: &serde_json::Value) -> Response {
        Response { status, content_type: "application/json", body: format!("{body}\n") }
    }

    pub(crate) fn error(status: u16, message: impl Into<String>) -> Response {
        Response::json(status, &serde_json::json!({ "error": message.into() }))
    }

    fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        let reason = match self.status {
            200 => "OK",
            201 => "Created",
            400 => "Bad Request",
            401 => "Unauthorized",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            409 => "Conflict",
            411 => "Length Required",
            413 => "Content Too Large",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        let Response { status, content_type, body } = self;
        let length = body.len();
        // In one call, so that a daemon that is killed has sent all of a short answer, or nothing.
        stream.write_all(
            format!(
                "HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            )
            .as_bytes(),
        )
    }
}

/// Accepts connections until the listener is shut down; other errors do not end the loop. Every connection has a thread of its
/// own.
pub(crate) fn serve(
    mut accept: impl FnMut() -> io::Result<TcpStream>,
    handle: impl Fn(&Request) -> Response + Send + Sync + 'static,
) {
    let handle = Arc::new(handle);
    let connections = Arc::new(Connections::default());
    let mut complained: Option<Instant> = None;
    loop {
        let stream = match accept() {
            Ok(stream) => Arc::new(stream),
            Err(error) => match after_accept(&error) {
                After::End => return,
                After::Next => continue,
                After::Nothing | After::Later => {
                    if complained.is_none_or(|at| at.elapsed() > COMPLAIN_EVERY) {
                        complained = Some(Instant::now());
                        log::warn!("penstock: cannot accept HTTP connections ({error}); trying again until it works");
                    }
                    connections.make_room();
                    std::thread::sleep(ACCEPT_AGAIN);
                    continue;
                }
            },
        };
        if !connections.enter(&stream) {
            continue;
        }
        let (handle, connections_there) = (Arc::clone(&handle), Arc::clone(&connections));
        let stream_there = Arc::clone(&stream);
        let started = std::thread::Builder::new().name("penstock-http".into()).spawn(move || {
            if let Err(error) = converse(&stream_there, &connections_there, &*handle) {
                log::debug!("penstock: an HTTP connection broke off: {error}");
            }
            connections_there.leave(&stream_there);
        });
        if started.is_err() {
            connections.leave(&stream);
        }
    }
}

/// The open connections.
#[derive(Default)]
struct Connections(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// Connections whose request is incomplete, or whose answer was sent; the oldest comes first.
    waiting: VecDeque<Arc<TcpStream>>,
    /// How many connections are being answered.
    answered: usize,
}

impl Connections {
    /// Adds a connection. Returns false if all are being answered; otherwise the oldest other one may be closed for it.
    fn enter(&self, stream: &Arc<TcpStream>) -> bool {
        let mut table = self.lock();
        if table.waiting.len() + table.answered >= CONNECTIONS && !table.drop_oldest() {
            return false;
        }
        table.waiting.push_back(Arc::clone(stream));
        true
    }

    /// Closes the oldest connection that is not being answered, which frees its descriptor.
    fn make_room(&self) {
        self.lock().drop_oldest();
    }

    /// The request is complete. Returns false if the connection was closed for another one in the meantime.
    fn is_read(&self, stream: &Arc<TcpStream>) -> bool {
        let mut table = self.lock();
        let is_here = table.take(stream);
        table.answered += usize::from(is_here);
        is_here
    }

    fn leave(&self, stream: &Arc<TcpStream>) {
        self.lock().take(stream);
    }

    /// The answer was sent, and may not have been read yet.
    fn is_answered(&self, stream: &Arc<TcpStream>) {
        let mut table = self.lock();
        table.answered -= 1;
        table.waiting.push_back(Arc::clone(stream));
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection that is being answered. Dropping it, also in a panic, ends that.
struct Answered<'a> {
    connections: &'a Connections,
    stream: &'a Arc<TcpStream>,
}

impl Drop for Answered<'_> {
    fn drop(&mut self) {
        self.connections.is_answered(self.stream);
    }
}

impl Table {
    fn drop_oldest(&mut self) -> bool {
        let Some(oldest) = self.waiting.pop_front() else { return false };
        // Its thread reads the end of the stream and ends.
        let _ = oldest.shutdown(Shutdown::Both);
        true
    }

    fn take(&mut self, stream: &Arc<TcpStream>) -> bool {
        let at = self.waiting.iter().position(|one| Arc::ptr_eq(one, stream));
        at.is_some_and(|at| self.waiting.remove(at).is_some())
    }
}

fn converse(
    stream: &Arc<TcpStream>,
    connections: &Connections,
    handle: &impl Fn(&Request) -> Response,
) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let deadline = Instant::now() + PATIENCE;
    let read = read(&mut Deadline { stream, deadline });
    if !connections.is_read(stream) {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    let answering = Answered { connections, stream };
    let answered = (|| {
        let response = match read {
            Ok(request) => handle(&request),
            Err(Unread::Refused(response)) => response,
            Err(Unread::Broken(error)) => return Err(error),
        };
        response.write(&mut &**stream)
    })();
    drop(answering);
    answered?;
    // Unread bytes would make the kernel reset the connection before the answer arrives.
    stream.shutdown(Shutdown::Write)?;
    let _ = io::copy(&mut Deadline { stream, deadline }.take(LEFT_OVER), &mut io::sink());
    Ok(())
}

#[derive(Debug)]
enum Unread {
    Refused(Response),
    Broken(io::Error),
}

fn read(stream: &mut impl Read) -> Result<Request, Unread> {
    let refuse = |status, message: &str| Unread::Refused(Response::error(status, message));
    let mut more = |bytes: &mut Vec<u8>| {
        let mut piece = [0; 4096];
        match stream.read(&mut piece) {
            Ok(0) => Err(Unread::Broken(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => {
                bytes.extend_from_slice(&piece[..count]);
                Ok(())
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Err(refuse(408, "the request did not come in time"))
            }
            Err(error) => Err(Unread::Broken(error)),
        }
    };
    let mut bytes = Vec::new();
    let (mut request, body_at, length) = loop {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS];
        let mut head = httparse::Request::new(&mut headers);
        match head.parse(&bytes) {
            Ok(httparse::Status::Complete(at)) if at <= HEAD_BYTES => {
                let length = body_length(head.headers).map_err(|(status, message)| refuse(status, message))?;
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let headers = head.headers.iter().map(|one| (one.name.to_string(), text(one.value))).collect();
                let (method, path) = (head.method.unwrap_or_default(), head.path.unwrap_or_default());
                if length == 0 && method == "PUT" {
                    return Err(refuse(411, "a job's body and its Content-Length are missing"));
                }
                break (Request { method: method.into(), path: path.into(), headers, body: Vec::new() }, at, length);
            }
            Ok(_) if bytes.len() > HEAD_BYTES => return Err(refuse(431, "the request's head is longer than 8 KiB")),
            Ok(_) => more(&mut bytes)?,
            Err(error) => return Err(refuse(400, &format!("not an HTTP request: {error}"))),
        }
    };
    while bytes.len() < body_at + length {
        more(&mut bytes)?;
    }
    request.body = bytes[body_at..body_at + length].to_vec();
    Ok(request)
}

fn body_length(headers: &[httparse::Header<'_>]) -> Result<usize, (u16, &'static str)> {
    let named = |name: &'static str| {
        headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name)).map(|h| h.value)
    };
    if named("Transfer-Encoding").next().is_some() {
        return Err((411, "the body's length must be known: send Content-Length"));
    }
    let mut lengths = named("Content-Length");
    let Some(length) = lengths.next() else {
        return Ok(0);
    };
    let digits = !length.is_empty() && length.iter().all(u8::is_ascii_digit);
    let length = std::str::from_utf8(length).ok().filter(|_| digits).and_then(|text| text.parse::<usize>().ok());
    match length {
        _ if lengths.next().is_some() => Err((400, "more than one Content-Length")),
        Some(length) if length <= BODY_BYTES => Ok(length),
        None if !digits => Err((400, "a Content-Length that is no number")),
        _ => Err((413, "the body is longer than 512 KiB")),
    }
}

/// A stream that can be read until a point in time, however slowly bytes come.
struct Deadline<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for Deadline<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        (&mut &*self.stream).read(bytes)
    }
}

/// How long accepting pauses when the machine lacks descriptors or memory.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// How often a lasting shortage is logged.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);
/// The most connections at a time.
const CONNECTIONS: usize = 32;
/// How long a whole request may take.
const PATIENCE: Duration = Duration::from_secs(5);
const HEAD_BYTES: usize = 8 << 10;
const HEADERS: usize = 32;
/// A job of 4,096 workers with addresses of IPv6 needs about 300 KiB.
const BODY_BYTES: usize = 512 << 10;
/// How much of a refused body is read, so that the client gets the answer.
const LEFT_OVER: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &[u8]) -> Result<Request, u16> {
        /// Hands out one byte at a time.
        struct Drip<'a>(&'a [u8]);
        impl Read for Drip<'_> {
            fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
                let count = self.0.len().min(1);
                bytes[..count].copy_from_slice(&self.0[..count]);
                self.0 = &self.0[count..];
                Ok(count)
            }
        }
        read(&mut Drip(text)).map_err(|error| match error {
            Unread::Refused(response) => response.status,
            Unread::Broken(_) => 0,
        })
    }

    /// A request is read however it is cut into pieces.
    #[test]
    fn requests() {
        let request =
            read_text(b"PUT /jobs/3?a=b HTTP/1.1\r\nHost: x\r\nContent-length: 4\r\nX-A: b\r\n\r\nbody").unwrap();
        assert_eq!(
            (request.method.as_str(), request.path.as_str(), &request.body[..]),
            ("PUT", "/jobs/3?a=b", &b"body"[..])
        );
        assert_eq!((request.header("x-a"), request.header("x-b")), (Some("b"), None));
        assert_eq!(read_text(b"GET / HTTP/1.0\r\n\r\n").unwrap().body, b"");
    }

    /// What is too long, malformed or of unknown length is refused before its body is read; what breaks off is not answered.
    #[test]
    fn refusals() {
        let with =
            |headers: &str| read_text(format!("PUT /jobs/3 HTTP/1.1\r\n{headers}\r\n\r\n").as_bytes()).unwrap_err();
        assert_eq!(with("Content-Length: 524289"), 413);
        assert_eq!(with("Content-Length: 99999999999999999999999"), 413);
        assert_eq!(with("Content-Length: -1"), 400);
        assert_eq!(with("Content-Length: 1\r\nContent-Length: 2"), 400);
        assert_eq!(with("Transfer-Encoding: chunked"), 411);
        assert_eq!(with("Host: x"), 411);
        assert_eq!(with("Content-Length: 5"), 0, "it breaks off");
        assert_eq!(with(&"X-A: b\r\n".repeat(40)), 400);
        assert_eq!(with(&format!("X-A: {}", "b".repeat(9000))), 431);
        assert_eq!(read_text(b"\x16\x03\x01 TLS\r\n\r\n").unwrap_err(), 400);
        assert_eq!(read_text(b"").unwrap_err(), 0);
    }

    /// Only a listener that was shut down ends the loop of `accept`, and clients after another error are answered.
    #[test]
    fn errors_of_accept_end_nothing() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // ENOBUFS, EPERM, EMFILE, ENFILE, ENOMEM, ECONNABORTED, EPROTO, and one that is not known.
        let mut errors = vec![105, 1, 24, 23, 12, 103, 71, 4000];
        let shared = Arc::new(listener);
        let accepting = Arc::clone(&shared);
        let accept = move || match errors.pop() {
            Some(number) => Err(io::Error::from_raw_os_error(number)),
            None => accepting.accept().map(|(stream, _)| stream),
        };
        let served = std::thread::spawn(move || serve(accept, |_| Response::error(404, "here")));
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
        rustix::net::shutdown(&*shared, rustix::net::Shutdown::Both).unwrap();
        served.join().expect("it has ended");
    }
}
