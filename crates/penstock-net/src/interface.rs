//! Which addresses to listen on, and why.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};

/// One address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name, as in `ip link`.
    pub name: String,
    /// Its address.
    pub address: IpAddr,
}

/// Picks the interfaces: those named (comma-separated names or addresses), else the one that routes to `master`
/// (`host:port`). Returns them with the reason.
///
/// # Errors
/// What was asked for and what there is.
pub fn choose(named: &[(&str, &str)], master: Option<&str>) -> Result<(Vec<Interface>, String), String> {
    let all = every().map_err(|error| format!("cannot list the network interfaces: {error}"))?;
    for (knob, value) in named {
        if value.trim().is_empty() {
            continue;
        }
        let mut chosen = Vec::new();
        for name in value.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            // NCCL's spellings: `=eth0` is exact (as here), a `^` excludes.
            let name = name.strip_prefix('=').unwrap_or(name);
            if name.starts_with('^') {
                continue;
            }
            let found = all
                .iter()
                .filter(|i| i.name == name || name.parse() == Ok(i.address))
                // An interface's first address, IPv4 before IPv6.
                .min_by_key(|i| i.address.is_ipv6());
            match found {
                Some(interface) => chosen.push(interface.clone()),
                None => {
                    let names: Vec<String> = all.iter().map(|i| format!("{} ({})", i.name, i.address)).collect();
                    return Err(format!(
                        "{knob} names {name:?}, which this host does not have; it has {}. Set {knob} to one of these.",
                        names.join(", ")
                    ));
                }
            }
        }
        if !chosen.is_empty() {
            return Ok((chosen, format!("{knob}={value}")));
        }
    }
    if let Some(master) = master
        && let Some(interface) = toward(master, &all)
    {
        return Ok((vec![interface], format!("the route to the master {master}")));
    }
    let loopback = all.iter().find(|i| i.address.is_loopback()).cloned();
    let interface = loopback.ok_or("this host has no network interface, not even loopback")?;
    Ok((vec![interface], "no master address is known: loopback only".into()))
}

/// The interface whose address packets to `master` would carry. Sends nothing: connecting a UDP socket only looks up
/// the route.
fn toward(master: &str, all: &[Interface]) -> Option<Interface> {
    let remote: SocketAddr = master.to_socket_addrs().ok()?.next()?;
    let any: SocketAddr = if remote.is_ipv4() { "0.0.0.0:0".parse().ok()? } else { "[::]:0".parse().ok()? };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(remote).ok()?;
    let address = socket.local_addr().ok()?.ip();
    let name = all.iter().find(|i| i.address == address).map_or("?", |i| &i.name);
    Some(Interface { name: name.to_owned(), address })
}

fn every() -> std::io::Result<Vec<Interface>> {
    Ok(if_addrs::get_if_addrs()?
        .into_iter()
        // Link-local IPv6 needs a scope that a contact does not carry.
        .filter(|i| !matches!(i.ip(), IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80))
        .map(|i| Interface { address: i.ip(), name: i.name })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A missing interface is named, with those that exist; the loopback's route is found.
    #[test]
    fn named_and_routed() {
        let error = choose(&[("PENSTOCK_INTERFACE", "nosuch0")], None).expect_err("missing");
        assert!(error.contains("nosuch0") && error.contains("lo ("), "{error}");
        let (chosen, reason) = choose(&[("PENSTOCK_INTERFACE", "")], Some("127.0.0.1:1")).expect("loopback");
        assert!(chosen[0].address.is_loopback(), "{chosen:?}");
        assert!(reason.contains("route"), "{reason}");
        let (chosen, reason) = choose(&[("A", ""), ("B", "lo")], None).expect("lo");
        assert_eq!((chosen[0].name.as_str(), reason.as_str()), ("lo", "B=lo"));
    }
}
