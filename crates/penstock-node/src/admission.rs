//! Parses and validates the body of `PUT /jobs/{job}`. Pure.

use crate::proof::unhex;
use penstock_aggregation::{Endpoint, Key, MAX_CHILDREN, MAX_PAYLOAD_BYTES, MAX_WORKERS, Naming, Node, Tree};
use serde::Deserialize;
use std::collections::HashMap;
use std::net::SocketAddr;

/// The address of a node in a job's tree. A node with several shards listens on as many ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeAddress {
    /// Of the first shard; the others have the ports behind it.
    pub(crate) first: SocketAddr,
    pub(crate) shards: u32,
}

impl NodeAddress {
    /// The address at which the node takes SeqNum `seq`.
    pub(crate) fn of(self, seq: u32) -> SocketAddr {
        let mut address = self.first;
        // The last port was checked to be valid.
        address.set_port(address.port() + (seq & (self.shards - 1)) as u16);
        address
    }

    /// No address: a worker that pushes and pulls over streams.
    pub(crate) const STREAM: NodeAddress =
        NodeAddress { first: SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0), shards: 1 };

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
    /// Results come apart from the blocks.
    pub(crate) apart: bool,
    pub(crate) start: u32,
}

/// A validated job. The driver's number of a node is its index in `nodes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    pub(crate) common: Common,
    /// Aggregator: the parent, the children, and the server if that is not the parent. Server: all workers by number, then the
    /// aggregators.
    pub(crate) nodes: Vec<Listed>,
    /// The node's number for every port of every address.
    pub(crate) endpoints: HashMap<SocketAddr, Endpoint>,
    pub(crate) role: RoleJob,
}

/// A node of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) address: NodeAddress,
    pub(crate) kind: Kind,
    /// The workers at or below it, for reports: such as "0-3,7".
    pub(crate) workers: String,
}

/// What a node is to the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Parent,
    Server,
    Worker,
    /// A worker behind a stream.
    Stream,
    Aggregator,
}

impl Kind {
    /// The name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Parent => "parent",
            Kind::Server => "server",
            Kind::Worker => "worker",
            Kind::Stream => "stream",
            Kind::Aggregator => "aggregator",
        }
    }
}

/// What only one role needs to know of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RoleJob {
    Aggregator {
        /// The node's own name at its parent.
        name: u64,
        /// The children's names, in the order of `nodes`.
        children: Vec<u64>,
        /// The job's server, where bitmaps name the children of a hop.
        server: Option<Endpoint>,
    },
    Server {
        tree: Tree,
        naming: Naming,
        /// How many of `nodes` are workers.
        workers: usize,
        /// Where results come apart: the most blocks that the server holds.
        held_blocks: Option<u32>,
    },
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
    done: DoneBody,
    #[serde(default)]
    start: u32,
    parent: AddressBody,
    children: Vec<ChildBody>,
    /// With `server`: bitmaps name the children of a hop, and this is the node's place among its parent's.
    place: Option<usize>,
    server: Option<String>,
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
    #[serde(default)]
    done: DoneBody,
    /// With `done` of buffers.
    pending_bytes: Option<u64>,
    start: u32,
    #[serde(default)]
    names: Names,
    tree: Vec<Branch>,
    workers: Vec<String>,
}

/// What the server is done with at once.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DoneBody {
    /// A block: its sum is its result.
    #[default]
    Block,
    /// A buffer, when the work behind it has ended.
    Buffer,
}

/// What bitmaps name.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Names {
    #[default]
    Workers,
    Children,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddressBody {
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
    Worker { worker: u16 },
    Aggregator { aggregator: AddressBody, children: Vec<Branch> },
}

fn one() -> u32 {
    1
}

/// Parses a job for an aggregator that listens on `here`.
pub(crate) fn aggregator_job(job: u32, body: &[u8], here: SocketAddr) -> Result<Admitted, String> {
    let body: AggregatorBody =
        serde_json::from_slice(body).map_err(|error| format!("not an aggregator's job: {error}"))?;
    let AggregatorBody { epoch, key, window, block_bytes, floats, done, start, parent, children, place, server } = body;
    let apart = done == DoneBody::Buffer;
    let common = Common { job, epoch, key: read_key(key)?, window, block_bytes, floats, apart, start };
    common.check()?;
    if place.is_some() != server.is_some() {
        return Err("place and server: give both, or, where bitmaps name workers, none".into());
    }
    if let Some(place) = place.filter(|place| *place >= MAX_CHILDREN) {
        return Err(format!("place is {place}; a node has at most {MAX_CHILDREN} children, numbered from 0"));
    }
    if place.is_some() && !floats {
        return Err("floats is false; where bitmaps name a hop's children, every aggregator adds floats".into());
    }
    if children.is_empty() || children.len() > MAX_CHILDREN {
        return Err(format!("children: {} are given; 1 to {MAX_CHILDREN} are possible", children.len()));
    }
    let mut book = Book::new(here);
    book.add("parent", &parent, Kind::Parent, String::new())?;
    let mut names = Vec::new();
    for (i, child) in children.iter().enumerate() {
        let what = format!("children[{i}]");
        let (name, kind, workers) = if place.is_some() {
            let workers = read_workers(&child.workers).map_err(|why| format!("{what}: {why}"))?;
            let kind = if workers.parse::<u16>().is_ok() { Kind::Worker } else { Kind::Aggregator };
            (1 << i, kind, workers)
        } else {
            child.bitmap(&what, names.iter().fold(0, |all, name| all | name))?
        };
        names.push(name);
        book.add(&what, &AddressBody { address: child.address.clone(), shards: child.shards }, kind, workers)?;
    }
    let server = match &server {
        None => None,
        Some(address) if *address == parent.address => Some(Endpoint(0)),
        Some(address) => {
            let body = AddressBody { address: address.clone(), shards: 1 };
            Some(book.add("server", &body, Kind::Server, String::new())?)
        }
    };
    let name = place.map_or_else(|| names.iter().fold(0, |all, name| all | name), |place| 1 << place);
    Ok(book.admitted(common, RoleJob::Aggregator { name, children: names, server }))
}

impl ChildBody {
    /// The workers at or below the child, none of which is `seen`, where bitmaps name workers.
    fn bitmap(&self, what: &str, seen: u64) -> Result<(u64, Kind, String), String> {
        let workers = self.workers.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
        let workers = workers.filter(|workers| *workers != 0).ok_or_else(|| {
            format!("{what}: workers is {:?}; a bitmap with a worker in it is needed, such as \"0x3\"", self.workers)
        })?;
        if workers & seen != 0 {
            return Err(format!("{what}: worker {} is below two children", (workers & seen).trailing_zeros()));
        }
        let numbers: Vec<u16> = (0..64).filter(|worker| workers >> worker & 1 == 1).collect();
        let kind = if numbers.len() == 1 { Kind::Worker } else { Kind::Aggregator };
        Ok((workers, kind, shown(&numbers)))
    }
}

/// Parses a job for a server that listens on `here`.
pub(crate) fn server_job(job: u32, body: &[u8], here: SocketAddr) -> Result<Admitted, String> {
    let body: ServerBody = serde_json::from_slice(body).map_err(|error| format!("not a server's job: {error}"))?;
    let ServerBody { epoch, key, window, block_bytes, floats, done, pending_bytes, start, names, tree, workers } = body;
    let apart = done == DoneBody::Buffer;
    let common = Common { job, epoch, key: read_key(key)?, window, block_bytes, floats, apart, start };
    common.check()?;
    let held_blocks = common.held_blocks(pending_bytes)?;
    let (naming, most) = match names {
        Names::Workers => (Naming::Workers, 64),
        Names::Children => (Naming::Children, MAX_WORKERS),
    };
    if workers.is_empty() || workers.len() > most {
        let cure = if most < workers.len() && workers.len() <= MAX_WORKERS {
            "; more need \"names\": \"children\", which no switch understands"
        } else {
            ""
        };
        return Err(format!("workers: {} addresses; 1 to {most} are possible{cure}", workers.len()));
    }
    let mut book = Book::new(here);
    for (i, address) in workers.iter().enumerate() {
        if address == "stream" {
            book.nodes.push(Listed { address: NodeAddress::STREAM, kind: Kind::Stream, workers: i.to_string() });
            continue;
        }
        let body = AddressBody { address: address.clone(), shards: 1 };
        book.add(&format!("workers[{i}]"), &body, Kind::Worker, i.to_string())?;
    }
    let children = tree.iter().map(|branch| book.branch(branch, naming)).collect::<Result<_, String>>()?;
    let tree = Tree { children };
    tree.check().map_err(|error| format!("tree: {error}"))?;
    if let Some(worker) = tree.workers().into_iter().find(|worker| usize::from(*worker) >= workers.len()) {
        return Err(format!("tree: worker {worker} has no address in workers"));
    }
    let is_beside = |worker: u16| {
        let is_stream = book.nodes[usize::from(worker)].kind == Kind::Stream;
        is_stream && !tree.children.contains(&Node::Worker(worker))
    };
    if let Some(worker) = tree.workers().into_iter().find(|worker| is_beside(*worker)) {
        return Err(format!(
            "tree: worker {worker} pushes over a stream, so it stands right below the server: move it up"
        ));
    }
    Ok(book.admitted(common, RoleJob::Server { tree, naming, workers: workers.len(), held_blocks }))
}

/// The text of a child's workers, which goes into reports as it is.
fn read_workers(text: &str) -> Result<String, String> {
    let is_shown = |byte: u8| byte.is_ascii_digit() || b",-.".contains(&byte);
    if text.is_empty() || text.len() > SHOWN_BYTES || !text.bytes().all(is_shown) {
        return Err(format!("workers is {text:?}; their numbers are needed, such as \"0-3,7\""));
    }
    Ok(text.to_owned())
}

/// Numbers of workers as ranges, the first few of them.
fn shown(workers: &[u16]) -> String {
    let mut workers = workers.to_vec();
    workers.sort_unstable();
    let mut text = String::new();
    for run in workers.chunk_by(|a, b| a + 1 == *b) {
        let (first, last) = (run[0], run[run.len() - 1]);
        let next = if first == last { first.to_string() } else { format!("{first}-{last}") };
        let comma = if text.is_empty() { "" } else { "," };
        if text.len() + 1 + next.len() + 4 > SHOWN_BYTES {
            return text + ",...";
        }
        text = text + comma + &next;
    }
    text
}

impl Common {
    /// The most blocks that a server holds: where results come apart, as many as fit into `pending_bytes`.
    fn held_blocks(&self, pending_bytes: Option<u64>) -> Result<Option<u32>, String> {
        if !self.apart {
            return match pending_bytes {
                None => Ok(None),
                Some(bytes) => Err(format!(
                    "pending_bytes is {bytes}, but every block is done when it is accepted: leave it out, or say \"done\": \"buffer\""
                )),
            };
        }
        let bytes = pending_bytes.unwrap_or(PENDING_BYTES.max(u64::from(self.window) * self.block_bytes as u64));
        match bytes / self.block_bytes as u64 {
            blocks @ 1..=MAX_HELD => Ok(Some(blocks as u32)),
            blocks => Err(format!(
                "pending_bytes is {bytes}, room for {blocks} blocks of {}: 1 to {MAX_HELD} are possible",
                self.block_bytes
            )),
        }
    }

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

/// Collects nodes and numbers them.
struct Book {
    here: SocketAddr,
    nodes: Vec<Listed>,
    endpoints: HashMap<SocketAddr, Endpoint>,
}

impl Book {
    fn new(here: SocketAddr) -> Book {
        Book { here, nodes: Vec::new(), endpoints: HashMap::new() }
    }

    fn add(&mut self, what: &str, body: &AddressBody, kind: Kind, workers: String) -> Result<Endpoint, String> {
        let AddressBody { address: text, shards } = body;
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
        let address = NodeAddress { first: address, shards: *shards };
        let endpoint = Endpoint(self.nodes.len() as u32);
        for port in address.ports() {
            if let Some(other) = self.endpoints.insert(port, endpoint) {
                return Err(format!("{what}: {port} is also the address of node {}", other.0));
            }
        }
        self.nodes.push(Listed { address, kind, workers });
        Ok(endpoint)
    }

    fn branch(&mut self, branch: &Branch, naming: Naming) -> Result<Node, String> {
        match branch {
            Branch::Worker { worker } => Ok(Node::Worker(*worker)),
            Branch::Aggregator { aggregator, children } => {
                let endpoint = self.add("tree", aggregator, Kind::Aggregator, String::new())?;
                let children =
                    children.iter().map(|child| self.branch(child, naming)).collect::<Result<_, String>>()?;
                let node = Node::Aggregator { endpoint, is_full: naming == Naming::Children, children };
                self.nodes[endpoint.0 as usize].workers = shown(&node.workers());
                Ok(node)
            }
        }
    }

    fn admitted(self, common: Common, role: RoleJob) -> Admitted {
        Admitted { common, nodes: self.nodes, endpoints: self.endpoints, role }
    }
}

/// The longest text of workers in a report.
const SHOWN_BYTES: usize = 64;
/// What a server holds if nothing else is said: more than two of torch's buckets of gradients.
pub(crate) const PENDING_BYTES: u64 = 64 << 20;
/// Far fewer blocks than half the circle of SeqNums.
const MAX_HELD: u64 = 1 << 24;
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
        let shown = |job: &Admitted| job.nodes.iter().map(|node| node.workers.clone()).collect::<Vec<_>>().join(" ");
        assert_eq!((job.common.start, job.common.floats, shown(&job).as_str()), (7, true, " 0-1 2"));
        assert_eq!(job.role, RoleJob::Aggregator { name: 7, children: vec![3, 4], server: None });
        let endpoint = |text: &str| job.endpoints.get(&text.parse().unwrap()).map(|endpoint| endpoint.0);
        assert_eq!(
            [endpoint("10.0.0.1:100"), endpoint("10.0.0.2:200"), endpoint("10.0.0.2:203")],
            [Some(0), Some(1), Some(1)]
        );
        assert_eq!([endpoint("10.0.0.3:300"), endpoint("10.0.0.2:204")], [Some(2), None]);
        assert_eq!(job.nodes[1].address.of(6).to_string(), "10.0.0.2:202");
        let job = server(SERVER).unwrap();
        assert_eq!(shown(&job), "0 1 2 1-2");
        let RoleJob::Server { tree, naming: Naming::Workers, workers: 3, held_blocks: None } = &job.role else {
            panic!("{job:?}")
        };
        assert_eq!(tree.workers(), [0, 2, 1]);
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
        // Where bitmaps name a hop's children.
        let hop = AGGREGATOR.replace("\"0x3\"", "\"0-1\"").replace("\"0x4\"", "\"2\"").replacen(
            "\"parent\"",
            "\"place\": 5, \"server\": \"10.0.0.7:700\", \"parent\"",
            1,
        );
        let job = aggregator(&hop).unwrap();
        assert_eq!(job.role, RoleJob::Aggregator { name: 32, children: vec![1, 2], server: Some(Endpoint(3)) });
        assert_eq!(
            job.nodes.iter().map(|node| node.kind.name()).collect::<Vec<_>>().join(" "),
            "parent aggregator worker server"
        );
        let below = aggregator(&hop.replace("10.0.0.7:700", "10.0.0.1:100")).unwrap();
        assert_eq!(below.role, RoleJob::Aggregator { name: 32, children: vec![1, 2], server: Some(Endpoint(0)) });
        let many = |count: u32| -> String {
            (0..count).map(|i| format!("{{\"address\": \"10.0.1.{i}:1\", \"workers\": \"{i}\"}},")).collect()
        };
        for (from, to, reason) in [
            ("\"place\": 5,", "", "place and server: give both"),
            ("\"place\": 5", "\"place\": 64", "place is 64; a node has at most 64 children"),
            ("\"floats\": true", "\"floats\": false", "every aggregator adds floats"),
            ("\"0-1\"", "\"0x1\"", "children[0]: workers is \"0x1\"; their numbers"),
            ("\"0-1\"", "\"\"", "children[0]: workers is \"\""),
            ("10.0.0.7:700", "10.0.0.3:300", "server: 10.0.0.3:300 is also the address of node 2"),
            ("\"children\": [", &format!("\"children\": [{}", many(63)), "children: 65 are given; 1 to 64"),
        ] {
            let text = hop.replacen(from, to, 1);
            assert_ne!(text, hop);
            let error = aggregator(&text).unwrap_err();
            assert!(error.contains(reason), "{error:?} should say {reason:?}");
        }
        let crowd = |count: usize, names: &str| {
            let addresses: Vec<String> = (0..count).map(|i| format!("\"10.1.{}.{}:9\"", i / 250, i % 250)).collect();
            let racks: Vec<String> = (0..count)
                .step_by(64)
                .map(|first| {
                    let below: Vec<String> =
                        (first..count.min(first + 64)).map(|worker| format!("{{\"worker\": {worker}}}")).collect();
                    let at = format!("10.2.0.{}:9", first / 64);
                    format!("{{\"aggregator\": {{\"address\": \"{at}\"}}, \"children\": [{}]}}", below.join(","))
                })
                .collect();
            let (workers, tree) = (addresses.join(","), racks.join(","));
            let text = SERVER.replacen("\"epoch\"", &format!("\"names\": \"{names}\", \"epoch\""), 1);
            let (head, _) = text.split_once("\"tree\"").unwrap();
            server(&format!("{head}\"tree\": [{tree}], \"workers\": [{workers}]}}"))
        };
        let job = crowd(4096, "children").unwrap();
        assert_eq!((job.nodes.len(), job.nodes[4097].workers.as_str()), (4096 + 64, "64-127"));
        assert!(crowd(4097, "children").unwrap_err().contains("4097 addresses; 1 to 4096 are possible"));
        assert!(crowd(65, "workers").unwrap_err().contains("1 to 64 are possible; more need \"names\": \"children\""));
        assert!(crowd(2, "hosts").unwrap_err().contains("unknown variant `hosts`"));
        let scattered: Vec<u16> = (0..200).map(|i| i * 7).collect();
        assert!(shown(&scattered).len() <= SHOWN_BYTES && shown(&scattered).ends_with(",..."));
        assert!(read_workers(&shown(&scattered)).is_ok());
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
