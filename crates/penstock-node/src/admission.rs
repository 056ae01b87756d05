//! Parses and validates the body of `PUT /jobs/{job}`. Pure.

use crate::proof::unhex;
use penstock_aggregation::{Endpoint, Key, MAX_PAYLOAD_BYTES, Node, Tree};
use serde::Deserialize;
use std::collections::HashMap;
use std::net::SocketAddr;

/// The address of a node in a job's tree. A node with several shards listens on as many ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) address: SocketAddr,
    pub(crate) shards: u32,
}

impl Place {
    /// The address at which the node takes SeqNum `seq`.
    pub(crate) fn of(self, seq: u32) -> SocketAddr {
        let mut address = self.address;
        // The last port was checked to be valid.
        address.set_port(address.port() + (seq & (self.shards - 1)) as u16);
        address
    }

    fn ports(self) -> impl Iterator<Item = SocketAddr> {
        (0..self.shards).map(move |shard| self.of(shard))
    }
}

/// What every role needs to know of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Common {
    pub(crate) job: u32,
    pub(crate) epoch: u16,
    pub(crate) key: Option<Key>,
    pub(crate) window: u32,
    pub(crate) block_bytes: usize,
    pub(crate) floats: bool,
    pub(crate) start: u32,
}

/// A validated job. The driver's number of a node is its index in `places`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    pub(crate) common: Common,
    /// Aggregator: the parent, then the children. Server: all workers by number, then the aggregators.
    pub(crate) places: Vec<Place>,
    /// The workers behind each of `places`; 0 for a parent.
    pub(crate) workers: Vec<u64>,
    /// The node's number for every port of every place.
    pub(crate) endpoints: HashMap<SocketAddr, Endpoint>,
    /// The tree of the job; `None` on an aggregator.
    pub(crate) tree: Option<Tree>,
    /// Only on a server: how many of `places` are workers.
    pub(crate) addressed: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AggregatorBody {
    epoch: u16,
    key: Option<String>,
    window: u32,
    block_bytes: usize,
    #[serde(default)]
    floats: bool,
    #[serde(default)]
    start: u32,
    parent: PlaceBody,
    children: Vec<ChildBody>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ServerBody {
    epoch: u16,
    key: Option<String>,
    window: u32,
    block_bytes: usize,
    #[serde(default)]
    floats: bool,
    start: u32,
    tree: Vec<Branch>,
    workers: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlaceBody {
    address: String,
    #[serde(default = "one")]
    shards: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChildBody {
    address: String,
    #[serde(default = "one")]
    shards: u32,
    workers: String,
}

#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Branch {
    Worker { worker: u8 },
    Aggregator { aggregator: PlaceBody, children: Vec<Branch> },
}

fn one() -> u32 {
    1
}

/// Parses a job for an aggregator that listens on `here`.
pub(crate) fn aggregator_job(job: u32, body: &[u8], here: SocketAddr) -> Result<Admitted, String> {
    let body: AggregatorBody =
        serde_json::from_slice(body).map_err(|error| format!("not an aggregator's job: {error}"))?;
    let AggregatorBody { epoch, key, window, block_bytes, floats, start, parent, children } = body;
    let common = Common { job, epoch, key: read_key(key)?, window, block_bytes, floats, start };
    common.check()?;
    let mut book = Book::new(here);
    book.add("parent", &parent, 0)?;
    let mut seen = 0;
    for (i, child) in children.iter().enumerate() {
        let what = format!("children[{i}]");
        let workers = child.workers.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
        let workers = workers.filter(|workers| *workers != 0).ok_or_else(|| {
            format!("{what}: workers is {:?}; a bitmap with a worker in it is needed, such as \"0x3\"", child.workers)
        })?;
        if workers & seen != 0 {
            return Err(format!("{what}: worker {} is below two children", (workers & seen).trailing_zeros()));
        }
        seen |= workers;
        book.add(&what, &PlaceBody { address: child.address.clone(), shards: child.shards }, workers)?;
    }
    if seen == 0 {
        return Err("children: an aggregator needs at least one".into());
    }
    Ok(book.admitted(common, None, 0))
}

/// Parses a job for a server that listens on `here`.
pub(crate) fn server_job(job: u32, body: &[u8], here: SocketAddr) -> Result<Admitted, String> {
    let body: ServerBody = serde_json::from_slice(body).map_err(|error| format!("not a server's job: {error}"))?;
    let ServerBody { epoch, key, window, block_bytes, floats, start, tree, workers } = body;
    let common = Common { job, epoch, key: read_key(key)?, window, block_bytes, floats, start };
    common.check()?;
    if workers.is_empty() || workers.len() > 64 {
        return Err(format!("workers: {} addresses; 1 to 64 are possible", workers.len()));
    }
    let mut book = Book::new(here);
    for (i, address) in workers.iter().enumerate() {
        book.add(&format!("workers[{i}]"), &PlaceBody { address: address.clone(), shards: 1 }, 1 << i)?;
    }
    let children = tree.iter().map(|branch| book.branch(branch)).collect::<Result<_, String>>()?;
    let tree = Tree { children };
    tree.check().map_err(|error| format!("tree: {error}"))?;
    if let Some(worker) = tree.workers().into_iter().find(|worker| usize::from(*worker) >= workers.len()) {
        return Err(format!("tree: worker {worker} has no address in workers"));
    }
    Ok(book.admitted(common, Some(tree), workers.len()))
}

impl Common {
    fn check(&self) -> Result<(), String> {
        let Common { window, block_bytes, .. } = self;
        if !window.is_power_of_two() || *window > MAX_WINDOW {
            return Err(format!("window is {window}; a power of two is needed, at most {MAX_WINDOW}"));
        }
        if !(1..=MAX_PAYLOAD_BYTES).contains(block_bytes) {
            return Err(format!("block_bytes is {block_bytes}; 1 to {MAX_PAYLOAD_BYTES} are possible"));
        }
        Ok(())
    }
}

fn read_key(key: Option<String>) -> Result<Option<Key>, String> {
    key.map(|hex| unhex(&hex).map(Key).ok_or_else(|| "key: 32 hex digits or null are needed".into())).transpose()
}

/// Collects places and numbers them.
struct Book {
    here: SocketAddr,
    places: Vec<Place>,
    workers: Vec<u64>,
    endpoints: HashMap<SocketAddr, Endpoint>,
}

impl Book {
    fn new(here: SocketAddr) -> Book {
        Book { here, places: Vec::new(), workers: Vec::new(), endpoints: HashMap::new() }
    }

    fn add(&mut self, what: &str, body: &PlaceBody, workers: u64) -> Result<Endpoint, String> {
        let PlaceBody { address: text, shards } = body;
        let address: SocketAddr = text
            .parse()
            .map_err(|_| format!("{what}: {text:?} is not an address and a port, such as 10.0.0.1:7471"))?;
        if address.ip().is_unspecified() || address.ip().is_multicast() || address.port() == 0 {
            return Err(format!("{what}: nobody can be reached at {address}"));
        }
        if address.is_ipv4() != self.here.is_ipv4() {
            return Err(format!("{what}: {address} cannot be reached from {}: one is IPv4, one is IPv6", self.here));
        }
        if !shards.is_power_of_two() || *shards > crate::Config::MAX_SHARDS {
            return Err(format!("{what}: {shards} shards; 1, 2, 4, 8 or 16 are possible"));
        }
        if u32::from(address.port()) + shards - 1 > 65535 {
            return Err(format!("{what}: {shards} shards from port {} on lead beyond 65535", address.port()));
        }
        let place = Place { address, shards: *shards };
        let endpoint = Endpoint(self.places.len() as u32);
        for port in place.ports() {
            if let Some(other) = self.endpoints.insert(port, endpoint) {
                return Err(format!("{what}: {port} is also the address of node {}", other.0));
            }
        }
        self.places.push(place);
        self.workers.push(workers);
        Ok(endpoint)
    }

    fn branch(&mut self, branch: &Branch) -> Result<Node, String> {
        match branch {
            Branch::Worker { worker } => Ok(Node::Worker(u16::from(*worker))),
            Branch::Aggregator { aggregator, children } => {
                let endpoint = self.add("tree", aggregator, 0)?;
                let children = children.iter().map(|child| self.branch(child)).collect::<Result<_, String>>()?;
                let node = Node::Aggregator { endpoint, is_full: false, children };
                // The whole tree with a number of 64 or more is refused right after this.
                let bit = |worker: u16| 1u64.checked_shl(u32::from(worker)).unwrap_or(0);
                self.workers[endpoint.0 as usize] = node.workers().into_iter().fold(0, |all, worker| all | bit(worker));
                Ok(node)
            }
        }
    }

    fn admitted(self, common: Common, tree: Option<Tree>, addressed: usize) -> Admitted {
        let Book { places, workers, endpoints, .. } = self;
        Admitted { common, places, workers, endpoints, tree, addressed }
    }
}

/// As the protocol's limit.
const MAX_WINDOW: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7471);

    fn aggregator(text: &str) -> Result<Admitted, String> {
        aggregator_job(5, text.as_bytes(), HERE)
    }

    fn server(text: &str) -> Result<Admitted, String> {
        server_job(5, text.as_bytes(), HERE)
    }

    const AGGREGATOR: &str = r#"{"epoch": 2, "key": "000102030405060708090a0b0c0d0e0f", "window": 8, "block_bytes": 64,
        "floats": true, "start": 7, "parent": {"address": "10.0.0.1:100", "shards": 1},
        "children": [{"address": "10.0.0.2:200", "shards": 4, "workers": "0x3"}, {"address": "10.0.0.3:300", "workers": "0x4"}]}"#;

    const SERVER: &str = r#"{"epoch": 2, "key": null, "window": 8, "block_bytes": 64, "floats": false, "start": 7,
        "tree": [{"worker": 0}, {"aggregator": {"address": "10.0.0.9:900", "shards": 2}, "children": [{"worker": 2}, {"worker": 1}]}],
        "workers": ["10.0.0.1:100", "10.0.0.2:100", "10.0.0.2:101"]}"#;

    /// Every port of every node has the node's number, and a SeqNum its port.
    #[test]
    fn nodes_and_ports() {
        let job = aggregator(AGGREGATOR).unwrap();
        assert_eq!(job.common.key, Some(Key(std::array::from_fn(|i| i as u8))));
        assert_eq!((job.common.start, job.common.floats, job.workers), (7, true, vec![0, 3, 4]));
        let endpoint = |text: &str| job.endpoints.get(&text.parse().unwrap()).map(|endpoint| endpoint.0);
        assert_eq!(
            [endpoint("10.0.0.1:100"), endpoint("10.0.0.2:200"), endpoint("10.0.0.2:203")],
            [Some(0), Some(1), Some(1)]
        );
        assert_eq!([endpoint("10.0.0.3:300"), endpoint("10.0.0.2:204")], [Some(2), None]);
        assert_eq!(job.places[1].of(6).to_string(), "10.0.0.2:202");
        let job = server(SERVER).unwrap();
        assert_eq!(job.workers, [1, 2, 4, 6]);
        assert_eq!(job.tree.unwrap().workers(), [0, 2, 1]);
        assert_eq!(job.endpoints[&"10.0.0.9:901".parse().unwrap()], Endpoint(3));
    }

    /// A job that is inconsistent is refused, and the error names the place.
    #[test]
    fn reasons() {
        for (from, to, reason) in [
            ("\"window\": 8", "\"window\": 6", "window is 6"),
            ("\"window\": 8", "\"window\": 131072", "window is 131072"),
            ("\"block_bytes\": 64", "\"block_bytes\": 0", "block_bytes is 0"),
            ("\"block_bytes\": 64", "\"block_bytes\": 9000", "block_bytes is 9000"),
            ("\"block_bytes\": 64", "\"block_bytes\": -1", "not an aggregator's job"),
            ("\"epoch\": 2", "\"epoch\": 70000", "not an aggregator's job"),
            ("000102", "0001", "key: 32 hex digits"),
            ("\"floats\"", "\"float\"", "unknown field `float`"),
            ("\"0x4\"", "\"0x2\"", "children[1]: worker 1 is below two children"),
            ("\"0x4\"", "\"0x0\"", "children[1]: workers is"),
            ("\"0x4\"", "\"4\"", "children[1]: workers is"),
            ("10.0.0.3:300", "10.0.0.2:202", "children[1]: 10.0.0.2:202 is also the address of node 1"),
            ("10.0.0.3:300", "10.0.0.3", "children[1]: \"10.0.0.3\" is not an address"),
            ("10.0.0.3:300", "0.0.0.0:300", "nobody can be reached"),
            ("10.0.0.3:300", "10.0.0.3:0", "nobody can be reached"),
            ("10.0.0.3:300", "[::1]:300", "one is IPv4, one is IPv6"),
            ("\"shards\": 4", "\"shards\": 3", "children[0]: 3 shards"),
            ("\"shards\": 4", "\"shards\": 32", "children[0]: 32 shards"),
            ("10.0.0.2:200", "10.0.0.2:65534", "beyond 65535"),
        ] {
            let text = AGGREGATOR.replacen(from, to, 1);
            assert_ne!(text, AGGREGATOR);
            let error = aggregator(&text).unwrap_err();
            assert!(error.contains(reason), "{error:?} should say {reason:?}");
        }
        for (from, to, reason) in [
            ("{\"worker\": 2}", "{\"worker\": 0}", "worker 0 stands twice"),
            ("{\"worker\": 2}", "{\"worker\": 200}", "worker 200 has no address"),
            ("{\"worker\": 2}", "{\"worker\": 5}", "worker 5 has no address"),
            ("[{\"worker\": 2}, {\"worker\": 1}]", "[]", "without children"),
            ("10.0.0.2:101", "10.0.0.2:100", "workers[2]: 10.0.0.2:100 is also the address of node 1"),
            ("10.0.0.9:900", "10.0.0.1:99", "tree: 10.0.0.1:100 is also the address of node 0"),
            ("\"start\": 7,", "", "missing field `start`"),
        ] {
            let text = SERVER.replacen(from, to, 1);
            assert_ne!(text, SERVER);
            let error = server(&text).unwrap_err();
            assert!(error.contains(reason), "{error:?} should say {reason:?}");
        }
        let no_workers = SERVER.replace(r#"["10.0.0.1:100", "10.0.0.2:100", "10.0.0.2:101"]"#, "[]");
        assert!(server(&no_workers).unwrap_err().contains("workers: 0 addresses"));
        assert!(aggregator("{}").unwrap_err().contains("missing field"));
        assert!(aggregator(SERVER).unwrap_err().contains("not an aggregator's job"));
        let deep = format!("{}{}", "[".repeat(60_000), "]".repeat(5000));
        assert!(aggregator(&deep).is_err() && server(&deep).is_err());
    }

    proptest! {
        /// A damaged body is refused or read, and never panics.
        #[test]
        fn damaged_bodies(at in 0usize..400, byte in any::<u8>(), cut in 0usize..600) {
            for text in [AGGREGATOR, SERVER] {
                let mut bytes = text.as_bytes().to_vec();
                let at = at % bytes.len();
                bytes[at] = byte;
                bytes.truncate(cut);
                let _ = aggregator_job(1, &bytes, HERE);
                let _ = server_job(1, &bytes, HERE);
            }
        }
    }
}
