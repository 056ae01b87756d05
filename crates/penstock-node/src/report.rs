//! A daemon's counters, as JSON and as Prometheus text.

use penstock_aggregation::{JobCounters, Refusal};
use penstock_net::datagrams::DatagramCounters;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::net::SocketAddr;

/// The jobs that a report is about.
#[derive(Clone, Debug)]
pub(crate) enum Which {
    All,
    /// Those with these numbers, in order.
    These(Vec<u32>),
}

impl Which {
    pub(crate) fn has(&self, job: u32) -> bool {
        match self {
            Which::All => true,
            Which::These(jobs) => jobs.binary_search(&job).is_ok(),
        }
    }
}

/// The counters of one shard; merged, those of the daemon.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub(crate) socket: DatagramCounters,
    /// Datagrams for which the kernel's receive buffer had no room.
    pub(crate) kernel_dropped: u64,
    /// Datagrams that were discarded because of `--drop`.
    pub(crate) dropped_on_purpose: u64,
    /// Packets that belong to no job here, by [`Refusal::index`].
    pub(crate) unauthenticated: [u64; Refusal::COUNT],
    pub(crate) jobs: Vec<JobReport>,
}

/// The counters and the state of a job.
#[derive(Clone, Debug)]
pub(crate) struct JobReport {
    pub(crate) job: u32,
    pub(crate) epoch: u16,
    pub(crate) keyed: bool,
    pub(crate) window: u32,
    pub(crate) block_bytes: usize,
    pub(crate) slots: usize,
    pub(crate) waiting_slots: usize,
    pub(crate) memory_bytes: usize,
    pub(crate) counters: JobCounters,
    /// Only on a server: what it committed, its Ack and Credit, and which aggregators are bypassed.
    pub(crate) server: Option<ServerReport>,
    pub(crate) nodes: Vec<NodeReport>,
    pub(crate) age_ns: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct ServerReport {
    pub(crate) committed: u64,
    pub(crate) ack: u32,
    pub(crate) credit: u32,
    /// Where results come apart.
    pub(crate) held: Option<HeldReport>,
    pub(crate) bypassed: Vec<SocketAddr>,
    /// Calls of workers behind streams that wait.
    pub(crate) waiting: usize,
    /// Buffers of theirs that were pushed, and whose outcome no pull has had.
    pub(crate) untold: usize,
}

/// What a server has accepted and still holds.
#[derive(Clone, Debug)]
pub(crate) struct HeldReport {
    /// The places that are taken, in bytes, and all of them.
    pub(crate) bytes: usize,
    pub(crate) pending_bytes: usize,
    /// Whole buffers that are not done.
    pub(crate) unfinished: usize,
}

/// Counters of one node of a job.
#[derive(Clone, Debug)]
pub(crate) struct NodeReport {
    pub(crate) address: SocketAddr,
    pub(crate) kind: &'static str,
    /// The workers at or below the node, such as "0-3,7"; nothing for those above.
    pub(crate) workers: String,
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    /// The node's part of the job's counters.
    pub(crate) counters: JobCounters,
    /// Time since its last packet that was not refused; `None`: no packet came since the job was opened.
    pub(crate) silent_ns: Option<u64>,
    /// Whether the node has shown that it receives packets, or need not.
    pub(crate) receives: bool,
}

impl Report {
    /// Adds the counters of another shard.
    pub(crate) fn merge(&mut self, other: Report) {
        let (mine, its) = (&mut self.socket, &other.socket);
        for (sum, more) in [
            (&mut mine.received, its.received),
            (&mut mine.received_trains, its.received_trains),
            (&mut mine.received_bytes, its.received_bytes),
            (&mut mine.sent, its.sent),
            (&mut mine.sent_calls, its.sent_calls),
            (&mut mine.sent_bytes, its.sent_bytes),
            (&mut mine.unsent, its.unsent),
            (&mut mine.blocked, its.blocked),
            (&mut self.kernel_dropped, other.kernel_dropped),
            (&mut self.dropped_on_purpose, other.dropped_on_purpose),
        ] {
            *sum += more;
        }
        add_all(&mut self.unauthenticated, &other.unauthenticated);
        for job in other.jobs {
            match self.jobs.iter_mut().find(|known| (known.job, known.epoch) == (job.job, job.epoch)) {
                None => self.jobs.push(job),
                Some(known) => known.merge(&job),
            }
        }
    }

    pub(crate) fn json(&self) -> Value {
        let DatagramCounters {
            received,
            received_trains,
            received_bytes,
            sent,
            sent_calls,
            sent_bytes,
            unsent,
            blocked,
        } = self.socket;
        json!({
            "socket": {
                "received": received, "received_trains": received_trains, "received_bytes": received_bytes,
                "sent": sent, "sent_calls": sent_calls, "sent_bytes": sent_bytes,
                "unsent": unsent, "blocked": blocked, "kernel_dropped": self.kernel_dropped,
                "dropped_on_purpose": self.dropped_on_purpose,
            },
            "unauthenticated": by_reason(&self.unauthenticated),
            "jobs": self.jobs.iter().map(JobReport::json).collect::<Vec<_>>(),
        })
    }

    /// The counters in Prometheus' text format, version 0.0.4.
    pub(crate) fn prometheus(&self, about: &About) -> String {
        let mut out = Metrics::default();
        let role = about.role;
        out.gauge("info", "What runs here.", &[(format!("role=\"{role}\",version=\"{}\"", about.version), 1)]);
        out.gauge("shards", "Threads and ports.", &[(String::new(), u64::from(about.shards))]);
        out.gauge("draining", "1 when it was asked to end.", &[(String::new(), u64::from(about.draining))]);
        let socket = &self.socket;
        for (name, help, value) in [
            ("datagrams_received", "Datagrams that came.", socket.received),
            ("trains_received", "Trains in which they came.", socket.received_trains),
            ("bytes_received", "Bytes of datagrams that came, without their headers.", socket.received_bytes),
            ("datagrams_sent", "Datagrams that left.", socket.sent),
            ("send_calls", "System calls that sent them.", socket.sent_calls),
            ("bytes_sent", "Bytes of datagrams that left.", socket.sent_bytes),
            ("datagrams_unsent", "Datagrams that the kernel refused to send.", socket.unsent),
            ("send_blocked", "Times that the send buffer was full.", socket.blocked),
            ("kernel_dropped", "Datagrams that the receive buffer had no room for.", self.kernel_dropped),
            ("dropped_on_purpose", "Datagrams thrown away because of --drop.", self.dropped_on_purpose),
            ("jobs_forgotten", "Jobs closed because all were silent.", about.forgotten),
        ] {
            out.counter(name, help, &[(String::new(), value)]);
        }
        let reasons = |counts: &[u64; Refusal::COUNT], labels: &str| -> Vec<(String, u64)> {
            let comma = if labels.is_empty() { "" } else { "," };
            let pairs = Refusal::NAMES.iter().zip(counts);
            pairs.map(|(name, count)| (format!("{labels}{comma}reason=\"{name}\""), *count)).collect()
        };
        out.counter("unauthenticated", "Packets that belong to no job here.", &reasons(&self.unauthenticated, ""));
        for (name, help, value) in [
            ("limit_jobs", "Jobs at most.", about.limits.jobs),
            ("limit_slots", "Slots at most.", about.limits.slots),
            ("limit_memory_bytes", "Bytes of sums at most.", about.limits.memory_bytes),
            ("jobs", "Jobs that are open.", self.jobs.len()),
        ] {
            out.gauge(name, help, &[(String::new(), value as u64)]);
        }
        let each = |value: &dyn Fn(&JobReport) -> u64| -> Vec<(String, u64)> {
            self.jobs.iter().map(|job| (job.labels(), value(job))).collect()
        };
        out.gauge("job_slots", "Slots of a job.", &each(&|job| job.slots as u64));
        out.gauge("job_waiting_slots", "Slots that hold an incomplete sum.", &each(&|job| job.waiting_slots as u64));
        out.gauge("job_memory_bytes", "Bytes that a job has reserved.", &each(&|job| job.memory_bytes as u64));
        out.counter("job_added", "Blocks added.", &each(&|job| job.counters.added));
        out.counter("job_completed", "Sums that went up for the first time.", &each(&|job| job.counters.completed));
        out.counter("job_repeated", "Sums that went up again.", &each(&|job| job.counters.repeated));
        out.counter("job_relayed", "Packets from above, passed to all children.", &each(&|job| job.counters.relayed));
        out.counter("job_abandoned", "Incomplete sums that a newer took over.", &each(&|job| job.counters.abandoned));
        let overflowed = "Sums in which an integer overflowed: some worker sent more than its share.";
        out.counter("job_overflowed", overflowed, &each(&|job| job.counters.overflowed));
        out.counter(
            "job_named",
            "Packets to the children that named missing blocks.",
            &each(&|job| job.counters.named),
        );
        let answered = "Results that a child had lost and got from here.";
        out.counter("job_answered", answered, &each(&|job| job.counters.answered));
        if role == "server" {
            let servers = |value: &dyn Fn(&ServerReport) -> u64| each(&|job| job.server.as_ref().map_or(0, value));
            out.counter("job_committed", "Sums committed.", &servers(&|server| server.committed));
            out.gauge("job_ack", "The next block that is not committed.", &servers(&|server| u64::from(server.ack)));
            out.gauge(
                "job_credit",
                "The highest block that may be sent.",
                &servers(&|server| u64::from(server.credit)),
            );
            let bypassed = servers(&|server| server.bypassed.len() as u64);
            let held = servers(&|server| server.held.as_ref().map_or(0, |held| held.bytes as u64));
            out.gauge("job_held_bytes", "Bytes accepted whose results not all workers have.", &held);
            let pending = servers(&|server| server.held.as_ref().map_or(0, |held| held.pending_bytes as u64));
            out.gauge("job_pending_bytes", "The limit of job_held_bytes.", &pending);
            out.gauge("job_bypassed_aggregators", "Aggregators that are bypassed.", &bypassed);
        }
        let refused =
            self.jobs.iter().flat_map(|job| reasons(&job.counters.refused, &job.labels())).collect::<Vec<_>>();
        out.counter("job_refused", "A job's packets without effect.", &refused);
        let nodes = |value: &dyn Fn(&NodeReport) -> u64| -> Vec<(String, u64)> {
            let all = self.jobs.iter().flat_map(|job| job.nodes.iter().map(move |node| (job, node)));
            all.map(|(job, node)| (format!("{},{}", job.labels(), node.labels()), value(node))).collect()
        };
        out.counter("node_packets", "Packets from a node of a job.", &nodes(&|node| node.packets));
        out.counter("node_bytes", "Their bytes.", &nodes(&|node| node.bytes));
        out.counter("node_added", "Blocks of its that were added.", &nodes(&|node| node.counters.added));
        let refused_of = |node: &NodeReport| node.counters.refused.iter().sum();
        out.counter("node_refused", "Its packets without effect.", &nodes(&refused_of));
        out.text
    }
}

/// Facts that rarely change.
pub(crate) struct About {
    pub(crate) role: &'static str,
    pub(crate) version: &'static str,
    pub(crate) shards: u32,
    pub(crate) draining: bool,
    pub(crate) forgotten: u64,
    pub(crate) limits: penstock_aggregation::Limits,
}

impl JobReport {
    fn merge(&mut self, other: &JobReport) {
        self.slots += other.slots;
        self.waiting_slots += other.waiting_slots;
        self.memory_bytes += other.memory_bytes;
        add(&mut self.counters, &other.counters);
        for (mine, its) in self.nodes.iter_mut().zip(&other.nodes) {
            mine.packets += its.packets;
            mine.bytes += its.bytes;
            add(&mut mine.counters, &its.counters);
            mine.receives |= its.receives;
            mine.silent_ns = match (mine.silent_ns, its.silent_ns) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
    }

    /// Time since the last packet of any node of the job.
    pub(crate) fn silent_ns(&self) -> u64 {
        self.nodes.iter().filter_map(|node| node.silent_ns).min().unwrap_or(self.age_ns)
    }

    fn labels(&self) -> String {
        format!("job=\"{}\",epoch=\"{}\"", self.job, self.epoch)
    }

    fn json(&self) -> Value {
        let mut fields = counters(&self.counters);
        for (name, value) in [
            ("job", json!(self.job)),
            ("epoch", json!(self.epoch)),
            ("keyed", json!(self.keyed)),
            ("window", json!(self.window)),
            ("block_bytes", json!(self.block_bytes)),
            ("slots", json!(self.slots)),
            ("waiting_slots", json!(self.waiting_slots)),
            ("memory_bytes", json!(self.memory_bytes)),
            ("age_s", json!(seconds(self.age_ns))),
            ("silent_s", json!(seconds(self.silent_ns()))),
            ("nodes", self.nodes.iter().map(NodeReport::json).collect()),
        ] {
            fields.insert(name.into(), value);
        }
        if let Some(ServerReport { committed, ack, credit, held, bypassed, .. }) = &self.server {
            fields.insert("committed".into(), json!(committed));
            fields.insert("ack".into(), json!(ack));
            fields.insert("credit".into(), json!(credit));
            fields.insert("done".into(), json!(if held.is_some() { "buffer" } else { "block" }));
            if let Some(HeldReport { bytes, pending_bytes, unfinished }) = held {
                fields.insert("held_bytes".into(), json!(bytes));
                fields.insert("pending_bytes".into(), json!(pending_bytes));
                fields.insert("unfinished".into(), json!(unfinished));
            }
            let bypassed: Vec<String> = bypassed.iter().map(SocketAddr::to_string).collect();
            fields.insert("bypassed".into(), json!(bypassed));
        }
        Value::Object(fields)
    }
}

impl NodeReport {
    fn labels(&self) -> String {
        format!("node=\"{}\",address=\"{}\",workers=\"{}\"", self.kind, self.address, self.workers)
    }

    fn json(&self) -> Value {
        let mut fields = counters(&self.counters);
        for (name, value) in [
            ("node", json!(self.kind)),
            ("address", json!(self.address.to_string())),
            ("workers", json!(self.workers)),
            ("packets", json!(self.packets)),
            ("bytes", json!(self.bytes)),
            ("silent_s", json!(self.silent_ns.map(seconds))),
            ("receives", json!(self.receives)),
        ] {
            fields.insert(name.into(), value);
        }
        Value::Object(fields)
    }
}

/// `sum += more`.
pub(crate) fn add(sum: &mut JobCounters, more: &JobCounters) {
    sum.added += more.added;
    sum.completed += more.completed;
    sum.repeated += more.repeated;
    sum.relayed += more.relayed;
    sum.abandoned += more.abandoned;
    sum.overflowed += more.overflowed;
    sum.named += more.named;
    sum.answered += more.answered;
    add_all(&mut sum.refused, &more.refused);
}

/// `after - before`, of counters that only grow.
pub(crate) fn since(after: &JobCounters, before: &JobCounters) -> JobCounters {
    JobCounters {
        added: after.added - before.added,
        completed: after.completed - before.completed,
        repeated: after.repeated - before.repeated,
        relayed: after.relayed - before.relayed,
        abandoned: after.abandoned - before.abandoned,
        overflowed: after.overflowed - before.overflowed,
        named: after.named - before.named,
        answered: after.answered - before.answered,
        refused: std::array::from_fn(|i| after.refused[i] - before.refused[i]),
    }
}

fn add_all(sum: &mut [u64; Refusal::COUNT], more: &[u64; Refusal::COUNT]) {
    sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

fn counters(counters: &JobCounters) -> Map<String, Value> {
    let JobCounters { added, completed, repeated, relayed, abandoned, overflowed, named, answered, refused } = counters;
    let value = json!({
        "added": added, "completed": completed, "repeated": repeated, "relayed": relayed, "abandoned": abandoned,
        "overflowed": overflowed, "named": named, "answered": answered, "refused": by_reason(refused),
    });
    let Value::Object(map) = value else { unreachable!("it was written as an object") };
    map
}

fn by_reason(counts: &[u64; Refusal::COUNT]) -> Value {
    Refusal::NAMES
        .iter()
        .zip(counts)
        .map(|(name, count)| (name.to_string(), json!(count)))
        .collect::<Map<_, _>>()
        .into()
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[derive(Default)]
struct Metrics {
    text: String,
}

impl Metrics {
    fn counter(&mut self, name: &str, help: &str, values: &[(String, u64)]) {
        self.family(&format!("{name}_total"), "counter", help, values);
    }

    fn gauge(&mut self, name: &str, help: &str, values: &[(String, u64)]) {
        self.family(name, "gauge", help, values);
    }

    /// Labels contain numbers, addresses and names of ours, which need no escaping.
    fn family(&mut self, name: &str, kind: &str, help: &str, values: &[(String, u64)]) {
        let out = &mut self.text;
        let _ = writeln!(out, "# HELP penstock_{name} {help}\n# TYPE penstock_{name} {kind}");
        for (labels, value) in values {
            let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
            let _ = writeln!(out, "penstock_{name}{braces} {value}");
        }
    }
}
