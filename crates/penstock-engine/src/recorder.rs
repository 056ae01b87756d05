//! The flight recorder: the last operations of this process, for the analysis of failures.
//!
//! It is always on: an entry costs a look at the clock and an uncontended lock. The records of several ranks side by side show
//! what one rank waited for while another did something else (`penstock flight`).

use crate::stats::Stats;
use penstock_core::groups::Call;
use penstock_plan::{Algorithm, Collective};
use penstock_stream::fingerprint::Fingerprint;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The record of one operation.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// The name of its group or channel.
    pub(crate) group: Arc<str>,
    /// Its number in its channel: for collectives, from 1 on. `None` for a receive that has no message yet.
    pub(crate) seq: Option<u64>,
    /// Of a send or a receive: which one.
    pub(crate) message: Option<Message>,
    pub(crate) what: Fingerprint,
    /// Bytes of the tensor.
    pub(crate) bytes: u64,
    pub(crate) algorithm: Algorithm,
    /// Which operations it is of use with; 0: none.
    pub(crate) coflow: u32,
    /// When its caller asked for it.
    pub(crate) issued: Instant,
    /// When it ended, and whether it succeeded.
    pub(crate) ended: Option<(Instant, bool)>,
    /// Ranks this operation is still waiting for. Computed on demand; kept after a failure for the error message.
    pub(crate) waits_for: Option<String>,
    /// Whether [`Recorder::take_ended`] has told it.
    pub(crate) is_told: bool,
}

/// A send or a receive. Both ends of a message know its tag, its number and each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Else it is a receive.
    pub is_send: bool,
    /// The rank in its group to which it goes, or from which it comes; `ANY_SOURCE` of a receive that has no message yet.
    pub other: u32,
    /// The caller's.
    pub tag: u32,
}

impl Message {
    /// `None`: a collective.
    pub(crate) fn of(call: &Call) -> Option<Message> {
        let (is_send, other) = match call.collective {
            Collective::Send { to } => (true, to),
            Collective::Recv { from } => (false, from),
            _ => return None,
        };
        Some(Message { is_send, other, tag: call.tag })
    }
}

/// An operation that has ended well, as [`Recorder::take_ended`] tells it.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The name of its group or channel.
    pub group: Arc<str>,
    /// Its number in its channel: for collectives, from 1 on; for messages, among those of one tag from the same rank to the same.
    pub number: Option<u64>,
    /// Of a send or a receive: which one.
    pub message: Option<Message>,
    /// Such as `all_reduce`.
    pub operation: &'static str,
    /// Of the tensor.
    pub bytes: u64,
    /// When it was issued, in nanoseconds of the host's monotonic clock.
    pub issued_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
}

/// Operations that are not told: they failed, or were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Untold {
    pub(crate) count: u64,
    /// When the earliest of them was issued.
    pub(crate) since: Option<Instant>,
}

impl Untold {
    fn add(&mut self, record: &Record) {
        self.count += 1;
        self.since = Some(self.since.map_or(record.issued, |since| since.min(record.issued)));
    }
}

/// Identifies an entry while it is in the recorder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(u64);

/// The last [`MOST_RECORDS`] operations. Clones share them: clients have threads of their own.
#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    rank: u32,
    /// Counts the lives of the job.
    generation: u32,
    host: String,
    folder: Option<PathBuf>,
    log: Arc<Mutex<Log>>,
    writer: Arc<Writer>,
}

/// What is to be written, and whether a thread is writing.
#[derive(Debug, Default)]
struct Writer {
    state: Mutex<Writing>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct Writing {
    /// The newest record; older ones that were not written are dropped.
    record: Option<String>,
    is_running: bool,
}

#[derive(Debug, Default)]
struct Log {
    records: VecDeque<Record>,
    /// How many entries were dropped.
    forgotten: u64,
    /// Of those that [`Recorder::take_ended`] will never tell, since its last call.
    untold: Untold,
}

impl Recorder {
    pub(crate) fn new(rank: u32, generation: u32, host: String, folder: Option<PathBuf>) -> Recorder {
        Recorder { rank, generation, host, folder, log: Arc::default(), writer: Arc::default() }
    }

    pub(crate) fn issued(&self, record: Record) -> Entry {
        let mut log = self.log();
        if log.records.len() == MOST_RECORDS {
            let oldest = log.records.pop_front().expect("there are many");
            log.forgotten += 1;
            if !oldest.is_told {
                log.untold.add(&oldest);
            }
        }
        log.records.push_back(record);
        Entry(log.forgotten + log.records.len() as u64 - 1)
    }

    /// A receive that waited for a message got its number.
    pub(crate) fn numbered(&self, entry: Entry, seq: u64, message: Option<Message>) {
        self.change(entry, |record| (record.seq, record.message, record.waits_for) = (Some(seq), message, None));
    }

    pub(crate) fn waits_for(&self, entry: Entry, what: String) {
        self.change(entry, |record| record.waits_for = Some(what));
    }

    /// Records an operation's end; only the first call counts.
    pub(crate) fn ended(&self, entry: Entry, now: Instant, well: bool) {
        self.change(entry, |record| {
            record.ended.get_or_insert((now, well));
            if well {
                record.waits_for = None;
            }
        });
    }

    /// All running operations of these channels have failed.
    pub(crate) fn failed(&self, channels: &[Arc<str>], now: Instant) {
        for record in self.log().records.iter_mut().filter(|record| channels.contains(&record.group)) {
            record.ended.get_or_insert((now, false));
        }
    }

    /// The operations that have ended since the last call, in the order in which they were issued, and those that failed, or were
    /// dropped before they could be told.
    pub(crate) fn take_ended(&self, nanoseconds: impl Fn(Instant) -> u64) -> (Vec<Ended>, Untold) {
        let mut log = self.log();
        let mut found = Vec::new();
        let mut untold = std::mem::take(&mut log.untold);
        for record in log.records.iter_mut().filter(|record| !record.is_told) {
            let Some((ended, well)) = record.ended else { continue };
            record.is_told = true;
            if well {
                found.push(Ended {
                    group: record.group.clone(),
                    number: record.seq,
                    message: record.message,
                    operation: record.what.name(),
                    bytes: record.bytes,
                    issued_ns: nanoseconds(record.issued),
                    ended_ns: nanoseconds(ended),
                });
            } else {
                untold.add(record);
            }
        }
        (found, untold)
    }

    fn change(&self, entry: Entry, change: impl FnOnce(&mut Record)) {
        let mut log = self.log();
        let at = entry.0.checked_sub(log.forgotten);
        if let Some(record) = at.and_then(|at| log.records.get_mut(at as usize)) {
            change(record);
        }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The whole record as JSON, the oldest operation first; `penstock.flight_record` documents the fields.
    pub(crate) fn describe(&self, stats: &Stats, now: Instant) -> String {
        let ago = |time: Instant| now.saturating_duration_since(time).as_secs_f64();
        let operation = |record: &Record| {
            json!({
                "group": &*record.group,
                "number": record.seq,
                "operation": record.what.describe(),
                "bytes": record.bytes,
                "algorithm": record.algorithm.to_string(),
                "coflow": record.coflow,
                "issued_s_ago": ago(record.issued),
                "ended_s_ago": record.ended.map(|(time, _)| ago(time)),
                "well": record.ended.map(|(_, well)| well),
                "waits_for": record.waits_for,
            })
        };
        // A channel that has failed by itself stands beside its group.
        let groups = stats.groups.iter().flat_map(|group| {
            let channels = group.channels.iter().filter(|channel| channel.failed.is_some());
            let channels = channels.map(|channel| json!({ "name": channel.name, "failed": channel.failed }));
            std::iter::once(json!({ "name": group.name, "failed": group.failed })).chain(channels)
        });
        let peers = stats.peers.iter().map(|peer| {
            json!({ "rank": peer.rank, "host": peer.host, "address": peer.address, "medium": peer.medium, "lost": peer.lost })
        });
        let record = json!({
            "format": "penstock-flight/1",
            "rank": self.rank,
            "generation": self.generation,
            "host": self.host,
            "pid": std::process::id(),
            "time": SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            "groups": groups.collect::<Value>(),
            "peers": peers.collect::<Value>(),
            "operations": self.log().records.iter().map(operation).collect::<Value>(),
        });
        record.to_string()
    }

    /// Writes the record to the folder, if there is one, in the background and on a separate thread: a file system may block
    /// for longer than peers wait for a heartbeat.
    pub(crate) fn write(&self, stats: &Stats) {
        if self.folder.is_none() {
            return;
        }
        let record = self.describe(stats, Instant::now());
        let mut writing = self.writing();
        writing.record = Some(record);
        if writing.is_running {
            return;
        }
        let recorder = self.clone();
        let started =
            std::thread::Builder::new().name("penstock-record".into()).spawn(move || recorder.write_records());
        match started {
            Ok(_) => writing.is_running = true,
            Err(error) => log::warn!("penstock: cannot start a thread that writes the last operations: {error}"),
        }
    }

    /// Blocks until everything is written, or for `timeout`.
    pub(crate) fn flush(&self, timeout: Duration) {
        let waited = self.writer.idle.wait_timeout_while(self.writing(), timeout, |writing| writing.is_running);
        let (_writing, result) = waited.unwrap_or_else(PoisonError::into_inner);
        if result.timed_out() {
            log::warn!("penstock: the last operations of rank {} are not written after {timeout:?}", self.rank);
        }
    }

    fn write_records(&self) {
        let Some(folder) = &self.folder else { return };
        let (rank, shown, name) = (self.rank, folder.display(), self.file_name());
        loop {
            let mut writing = self.writing();
            let Some(record) = writing.record.take() else {
                writing.is_running = false;
                self.writer.idle.notify_all();
                return;
            };
            drop(writing);
            match self.write_to(folder, &record) {
                Ok(()) => log::warn!(
                    "penstock: the last operations of rank {rank} are in {shown}/{name}; `penstock flight {shown}` reads them"
                ),
                Err(error) => {
                    log::warn!("penstock: the last operations of rank {rank} cannot be written to {shown}: {error}");
                }
            }
        }
    }

    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.writer.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_to(&self, folder: &Path, record: &str) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        // A reader finds the previous file while this one is being written.
        let fresh = folder.join(format!(".rank-{}.{}", self.rank, std::process::id()));
        std::fs::write(&fresh, record)?;
        std::fs::rename(fresh, folder.join(self.file_name()))
    }

    /// The file's name. A job that starts again keeps the files of its earlier lives.
    fn file_name(&self) -> String {
        match self.generation {
            0 => format!("rank-{}.json", self.rank),
            generation => format!("rank-{}.{generation}.json", self.rank),
        }
    }
}

/// Some steps of a model with hundreds of tensors; 100 KB.
const MOST_RECORDS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_stream::fingerprint::Name;
    use penstock_types::DType;

    fn record(group: &str, seq: u64, issued: Instant) -> Record {
        Record {
            group: group.into(),
            seq: Some(seq),
            message: None,
            what: Fingerprint::new(Name::AllReduce, None, DType::F32, None, seq),
            bytes: 4 * seq,
            algorithm: Algorithm::Ring,
            coflow: 0,
            issued,
            ended: None,
            waits_for: None,
            is_told: false,
        }
    }

    /// The last operations stay, the oldest go, and an end finds its operation, or nothing if that is gone. What one lacked is told
    /// until it ends well; a group's failure ends what runs there, and nothing else.
    #[test]
    fn the_last_ones_stay() {
        let recorder = Recorder::new(3, 0, "h".into(), None);
        let start = Instant::now();
        let at = |ns| start + Duration::from_nanos(ns);
        let record = |seq| record(if seq == 1002 { "f" } else { "g" }, seq, at(seq));
        let entries: Vec<Entry> =
            (0..MOST_RECORDS as u64 + 10).map(|seq| recorder.clone().issued(record(seq))).collect();
        recorder.ended(entries[9], at(5000), true);
        recorder.ended(entries[10], at(5001), false);
        recorder.waits_for(entries[1000], "nobody".into());
        recorder.ended(entries[1000], at(5002), true);
        recorder.waits_for(entries[1002], "rank 7".into());
        recorder.failed(&["f".into()], at(5003));
        recorder.ended(entries[1002], at(5004), false);
        let record: Value = serde_json::from_str(&recorder.describe(&Stats::default(), at(6000))).expect("JSON");
        let records = record["operations"].as_array().expect("a list");
        assert_eq!((records.len(), &records[0]["number"], &record["rank"]), (MOST_RECORDS, &json!(10), &json!(3)));
        let ended: Vec<_> = (records.iter().filter(|record| !record["well"].is_null()))
            .map(|record| (&record["number"], &record["well"], &record["ended_s_ago"], &record["waits_for"]))
            .collect();
        let (nothing, rank) = (json!(null), json!("rank 7"));
        assert_eq!(
            ended,
            [
                (&json!(10), &json!(false), &json!(999e-9), &nothing),
                (&json!(1000), &json!(true), &json!(998e-9), &nothing),
                (&json!(1002), &json!(false), &json!(997e-9), &rank),
            ]
        );
    }

    /// Who takes what has ended gets each operation once, at its end and not before, but for those that failed; and is told how many
    /// were dropped.
    #[test]
    fn each_end_is_told_once() {
        let recorder = Recorder::new(0, 0, "h".into(), None);
        let start = Instant::now();
        let at = |ns| start + Duration::from_nanos(ns);
        let issue = |seq| recorder.issued(record("g", seq, at(seq)));
        let told = || {
            let (ended, untold) = recorder.take_ended(|time| time.duration_since(start).as_nanos() as u64);
            let since = untold.since.map(|since| since.duration_since(start).as_nanos());
            let told = ended.iter().map(|one| (one.number, one.ended_ns - one.issued_ns)).collect::<Vec<_>>();
            (told, untold.count, since)
        };
        let entries: Vec<Entry> = (1..=4).map(issue).collect();
        recorder.ended(entries[2], at(10), true);
        recorder.ended(entries[0], at(12), true);
        recorder.ended(entries[1], at(13), false);
        assert_eq!(told(), (vec![(Some(1), 11), (Some(3), 7)], 1, Some(2)), "in order of issue, and not what failed");
        assert_eq!(told(), (vec![], 0, None));
        recorder.ended(entries[3], at(20), true);
        for seq in 5..=MOST_RECORDS as u64 + 4 {
            issue(seq);
        }
        assert_eq!(told(), (vec![], 1, Some(4)), "of four that were dropped all but the last were told");
        assert_eq!(told(), (vec![], 0, None));
    }

    /// What a receive from any source receives is known when it has got its number, and told at its end.
    #[test]
    fn messages_are_told() {
        let recorder = Recorder::new(0, 0, "h".into(), None);
        let start = Instant::now();
        let from = |other| Some(Message { is_send: false, other, tag: 5 });
        let entry = recorder.issued(Record { seq: None, message: from(u32::MAX), ..record("g", 0, start) });
        recorder.numbered(entry, 7, from(2));
        recorder.ended(entry, start, true);
        let (ended, _) = recorder.take_ended(|_| 0);
        assert_eq!(ended.iter().map(|one| (one.number, one.message)).collect::<Vec<_>>(), [(Some(7), from(2))]);
    }

    /// A folder on a file system that blocks holds up neither who asks for a record nor the next one, and what was asked for
    /// last is what stands there in the end.
    #[test]
    fn a_slow_file_system_blocks_nobody() {
        let folder = std::env::temp_dir().join(format!("penstock-recorder-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let recorder = Recorder::new(0, 0, "h".into(), Some(folder.clone()));
        // Opening a pipe for writing blocks until somebody reads it.
        let pipe = folder.join(format!(".rank-0.{}", std::process::id()));
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
        assert!(made.success());
        let began = Instant::now();
        recorder.write(&Stats::default());
        while recorder.writing().record.is_some() {
            assert!(began.elapsed() < Duration::from_secs(30), "nobody writes it");
            std::thread::yield_now();
        }
        recorder.write(&Stats::default());
        recorder.write(&Stats::default());
        recorder.flush(Duration::from_millis(1));
        assert!(
            recorder.writing().is_running && recorder.writing().record.is_some(),
            "the first one is not written yet"
        );
        drop(std::fs::read(&pipe).expect("the first record"));
        recorder.flush(Duration::from_secs(30));
        assert!(!recorder.writing().is_running && recorder.writing().record.is_none());
        let record: Value =
            serde_json::from_slice(&std::fs::read(folder.join("rank-0.json")).expect("a record")).expect("JSON");
        assert_eq!(record["rank"], 0);
        std::fs::remove_dir_all(folder).expect("removed");
    }
}
