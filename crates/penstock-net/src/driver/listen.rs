//! Sockets that listen, and the options of TCP sockets.

use crate::contact::Contact;
use penstock_stream::handshake::NodeKey;
use rustix::fd::OwnedFd;
use socket2::{Domain, Protocol, SockAddr, Type};
use std::io;
use std::net::{IpAddr, SocketAddr};

pub(super) fn bind_tcp(
    address: IpAddr,
    ports: std::ops::RangeInclusive<u16>,
) -> Result<(socket2::Socket, SocketAddr), String> {
    let mut last = None;
    for port in ports.clone() {
        let attempt = || -> io::Result<socket2::Socket> {
            let address = SocketAddr::new(address, port);
            let socket = socket2::Socket::new(
                Domain::for_address(address),
                Type::STREAM.nonblocking().cloexec(),
                Some(Protocol::TCP),
            )?;
            // A fixed port may still be in TIME_WAIT from the job before.
            socket.set_reuse_address(true)?;
            socket.bind(&address.into())?;
            socket.listen(1024)?;
            Ok(socket)
        };
        match attempt() {
            Ok(socket) => {
                let bound = socket.local_addr().ok().and_then(|a| a.as_socket());
                return Ok((socket, bound.ok_or("the kernel does not say which port it gave")?));
            }
            Err(error) => last = Some(error),
        }
    }
    let error = last.map_or_else(|| "the range is empty".to_owned(), |error| error.to_string());
    Err(format!(
        "cannot listen on {address}, ports {}-{}: {error}. Free one, or set PENSTOCK_PORT_RANGE to others",
        ports.start(),
        ports.end()
    ))
}

pub(super) fn bind_local(node: &NodeKey) -> io::Result<OwnedFd> {
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM.nonblocking().cloexec(), None)?;
    socket.bind(&SockAddr::unix(Contact::local_name(node))?)?;
    socket.listen(1024)?;
    Ok(socket.into())
}

pub(super) fn tune(socket: &socket2::Socket, buffer_bytes: usize) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if buffer_bytes > 0 {
        socket.set_send_buffer_size(buffer_bytes)?;
        socket.set_recv_buffer_size(buffer_bytes)?;
    }
    Ok(())
}
