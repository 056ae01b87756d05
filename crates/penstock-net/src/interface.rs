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

/// Chooses the interfaces: those that the first non-empty setting names, otherwise the one that routes to `master`
/// (`host:port`). Returns them with the reason.
///
/// A setting is a comma-separated list of exact names or addresses; `NCCL_SOCKET_IFNAME` is read as NCCL reads it, see
/// [`as_nccl`].
///
/// # Errors
/// The interfaces that were asked for, and those that exist.
pub fn choose(named: &[(&str, &str)], master: Option<&str>) -> Result<(Vec<Interface>, String), String> {
    let all = every().map_err(|error| format!("cannot list the network interfaces: {error}"))?;
    for (setting, value) in named {
        let value = value.trim();
        if value.is_empty() {
            continue;
        }
        let chosen = if *setting == NCCL { as_nccl(value, &all) } else { exactly(value, &all) };
        return match chosen {
            Ok(chosen) => Ok((chosen, format!("{setting}={value}"))),
            Err(missing) => {
                let names: Vec<String> = all.iter().map(|i| format!("{} ({})", i.name, i.address)).collect();
                Err(format!(
                    "{setting} names {missing:?}, which this host does not have, or not up; it has {}. Set {setting} to one of \
                     these.",
                    names.join(", ")
                ))
            }
        };
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

/// The interfaces of a list of names and addresses, in its order. The error is the first entry that does not exist.
fn exactly(value: &str, all: &[Interface]) -> Result<Vec<Interface>, String> {
    let entries = entries(value);
    let found = entries.iter().map(|entry| {
        let named = all.iter().filter(|i| i.name == *entry || entry.parse() == Ok(i.address));
        named.min_by_key(|i| i.address.is_ipv6()).cloned().ok_or_else(|| (*entry).to_owned())
    });
    let found: Vec<_> = found.collect::<Result<_, _>>()?;
    if found.is_empty() { Err(value.to_owned()) } else { Ok(found) }
}

/// The interfaces that NCCL would take: all whose name starts with an entry of the list, in the system's order. After `=` the
/// names are exact; after `^` (or `^=`) all other interfaces are taken. With exclusions NCCL would also listen on loopback and
/// docker's bridges; here these are taken only if nothing else is left, since no other host can reach them.
fn as_nccl(value: &str, all: &[Interface]) -> Result<Vec<Interface>, String> {
    let (excludes, list) = value.strip_prefix('^').map_or((false, value), |list| (true, list));
    let (exact, list) = list.strip_prefix('=').map_or((false, list), |list| (true, list));
    let entries = entries(list);
    let listed = |name: &str| entries.iter().any(|entry| if exact { name == *entry } else { name.starts_with(entry) });
    let mut found: Vec<Interface> = Vec::new();
    for interface in all.iter().filter(|i| listed(&i.name) != excludes) {
        match found.iter_mut().find(|known| known.name == interface.name) {
            Some(known) if known.address.is_ipv6() && interface.address.is_ipv4() => *known = interface.clone(),
            Some(_) => {}
            None => found.push(interface.clone()),
        }
    }
    if excludes && !found.iter().all(is_inward) {
        found.retain(|interface| !is_inward(interface));
    }
    if found.is_empty() { Err(value.to_owned()) } else { Ok(found) }
}

/// Whether the interface leads to no other host.
fn is_inward(interface: &Interface) -> bool {
    interface.address.is_loopback() || interface.name.starts_with("docker")
}

fn entries(list: &str) -> Vec<&str> {
    list.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect()
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
        // An interface that is down carries nothing, and its address may belong to another host.
        .filter(if_addrs::Interface::is_oper_up)
        // Link-local IPv6 needs a scope that a contact does not carry.
        .filter(|i| !matches!(i.ip(), IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80))
        .map(|i| Interface { address: i.ip(), name: i.name })
        .collect())
}

const NCCL: &str = "NCCL_SOCKET_IFNAME";

#[cfg(test)]
mod tests {
    use super::*;

    /// As `(name, address)`, in the system's order.
    const HOST: [(&str, &str); 8] = [
        ("lo", "127.0.0.1"),
        ("eth0", "10.0.0.2"),
        ("eth1", "fd00::3"),
        ("eth1", "10.1.0.2"),
        ("eth10", "10.2.0.2"),
        ("ib0", "fd00::4"),
        ("docker0", "172.17.0.1"),
        ("lo", "::1"),
    ];

    fn addresses(found: Result<Vec<Interface>, String>) -> Result<String, String> {
        found.map(|found| found.iter().map(|i| i.address.to_string()).collect::<Vec<_>>().join(" "))
    }

    fn host(interfaces: &[(&str, &str)]) -> Vec<Interface> {
        let interface = |(name, address): &(&str, &str)| Interface {
            name: (*name).to_owned(),
            address: address.parse().expect("an address"),
        };
        interfaces.iter().map(interface).collect()
    }

    /// Prefixes, exact names and exclusions select what NCCL would, an address each; loopback and docker's bridges are left
    /// out of what is only not excluded, unless nothing else is there.
    #[test]
    fn as_nccl_reads_it() {
        for (value, expected) in [
            ("eth", "10.0.0.2 10.1.0.2 10.2.0.2"),
            ("ib, eth1", "10.1.0.2 10.2.0.2 fd00::4"),
            ("=eth1,ib0", "10.1.0.2 fd00::4"),
            ("=eth1,nosuch", "10.1.0.2"),
            ("lo", "127.0.0.1"),
            ("docker,eth0", "10.0.0.2 172.17.0.1"),
            ("^eth1", "10.0.0.2 fd00::4"),
            ("^=eth1,ib0", "10.0.0.2 10.2.0.2"),
            ("^lo,docker", "10.0.0.2 10.1.0.2 10.2.0.2 fd00::4"),
            ("^eth,ib", "127.0.0.1 172.17.0.1"),
            ("^eth,ib,docker", "127.0.0.1"),
        ] {
            assert_eq!(addresses(as_nccl(value, &host(&HOST))), Ok(expected.to_owned()), "{value}");
        }
        for value in ["wlan", "=eth", "^lo,eth,ib,docker", "=", ","] {
            assert_eq!(as_nccl(value, &host(&HOST)), Err(value.to_owned()));
        }
    }

    /// Elsewhere names are exact, and addresses choose among several of one interface; what is missing is named.
    #[test]
    fn exact_names_and_addresses() {
        for (value, expected) in
            [("eth1", "10.1.0.2"), ("ib0 , eth0", "fd00::4 10.0.0.2"), ("fd00::3,10.1.0.2", "fd00::3 10.1.0.2")]
        {
            assert_eq!(addresses(exactly(value, &host(&HOST))), Ok(expected.to_owned()), "{value}");
        }
        for (value, missing) in [("eth", "eth"), ("eth0,=eth1", "=eth1"), ("10.9.9.9", "10.9.9.9"), (",", ",")] {
            assert_eq!(exactly(value, &host(&HOST)), Err(missing.to_owned()));
        }
    }

    /// A missing interface is named, with those that exist; the loopback's route is found.
    #[test]
    fn named_and_routed() {
        let error = choose(&[("PENSTOCK_INTERFACE", "nosuch0")], None).expect_err("missing");
        assert!(error.contains("nosuch0") && error.contains("lo ("), "{error}");
        let (chosen, reason) = choose(&[("PENSTOCK_INTERFACE", "")], Some("127.0.0.1:1")).expect("loopback");
        assert!(chosen[0].address.is_loopback(), "{chosen:?}");
        assert!(reason.contains("route"), "{reason}");
        let (chosen, _) = choose(&[(NCCL, "l")], None).expect("a prefix");
        assert!(chosen.iter().any(|interface| interface.name == "lo"), "{chosen:?}");
        let (chosen, reason) = choose(&[("A", ""), ("B", "lo")], None).expect("lo");
        assert_eq!((chosen[0].name.as_str(), reason.as_str()), ("lo", "B=lo"));
    }
}
