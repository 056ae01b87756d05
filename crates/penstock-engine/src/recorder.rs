//! The flight recorder: the last operations of this process, for when something has gone wrong.
//!
//! It is always on: an entry costs less than the lock that brought the operation here. What one rank was waiting for while
//! another did something else is seen when the records of several are laid side by side (`penstock flight`).

use crate::stats::Stats;
use penstock_plan::Algorithm;
use penstock_protocol::fingerprint::Fingerprint;
use penstock_types::Time;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// One operation, as the recorder knows it.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// The group's name.
    pub(crate) group: Arc<str>,
    /// Its place among the operations of its channel: for collectives, from 1 on.
    pub(crate) seq: u64,
    pub(crate) what: Fingerprint,
    /// Bytes of the tensor.
    pub(crate) bytes: u64,
    pub(crate) algorithm: Algorithm,
    pub(crate) issued: Time,
    /// When it ended, and whether well.
    pub(crate) ended: Option<(Time, bool)>,
}

/// Names an entry as long as it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(u64);

/// The last [`MOST_RECORDS`] operations.
#[derive(Debug)]
pub(crate) struct Recorder {
    rank: u32,
    /// Of the job's lives.
    generation: u32,
    host: String,
    folder: Option<PathBuf>,
    records: VecDeque<Record>,
    /// Entries that are gone.
    forgotten: u64,
}

impl Recorder {
    pub(crate) fn new(rank: u32, generation: u32, host: String, folder: Option<PathBuf>) -> Recorder {
        Recorder { rank, generation, host, folder, records: VecDeque::new(), forgotten: 0 }
    }

    pub(crate) fn issued(&mut self, record: Record) -> Entry {
        if self.records.len() == MOST_RECORDS {
            self.records.pop_front();
            self.forgotten += 1;
        }
        self.records.push_back(record);
        Entry(self.forgotten + self.records.len() as u64 - 1)
    }

    pub(crate) fn ended(&mut self, entry: Entry, now: Time, well: bool) {
        let at = entry.0.checked_sub(self.forgotten);
        if let Some(record) = at.and_then(|at| self.records.get_mut(at as usize)) {
            record.ended = Some((now, well));
        }
    }

    /// All of it as JSON, the oldest operation first; `penstock.flight_record` says what the fields are.
    pub(crate) fn describe(&self, stats: &Stats, now: Time) -> String {
        let ago = |time: Time| now.since(time) as f64 / 1e9;
        let operation = |record: &Record| {
            json!({
                "group": &*record.group,
                "number": record.seq,
                "operation": record.what.describe(),
                "bytes": record.bytes,
                "algorithm": record.algorithm.to_string(),
                "issued_s_ago": ago(record.issued),
                "ended_s_ago": record.ended.map(|(time, _)| ago(time)),
                "well": record.ended.map(|(_, well)| well),
            })
        };
        let groups = stats.groups.iter().map(|group| json!({ "name": group.name, "failed": group.failed }));
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
            "operations": self.records.iter().map(operation).collect::<Value>(),
        });
        record.to_string()
    }

    /// Writes it to the folder, if there is one. Blocks for as long as the file system does: something has failed already.
    pub(crate) fn write(&self, stats: &Stats, now: Time) {
        let Some(folder) = &self.folder else { return };
        let (rank, shown, name) = (self.rank, folder.display(), self.file_name());
        match self.write_to(folder, stats, now) {
            Ok(()) => log::warn!(
                "penstock: the last operations of rank {rank} are in {shown}/{name}; `penstock flight {shown}` reads them"
            ),
            Err(error) => {
                log::warn!("penstock: the last operations of rank {rank} cannot be written to {shown}: {error}");
            }
        }
    }

    fn write_to(&self, folder: &Path, stats: &Stats, now: Time) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        // Whoever reads while it is written finds the one before.
        let fresh = folder.join(format!(".rank-{}.{}", self.rank, std::process::id()));
        std::fs::write(&fresh, self.describe(stats, now))?;
        std::fs::rename(fresh, folder.join(self.file_name()))
    }

    /// A job that starts again leaves what its earlier lives wrote.
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
    use penstock_protocol::fingerprint::Name;
    use penstock_types::DType;

    /// The last operations stay, the oldest go, and an end finds its operation, or nothing if that is gone.
    #[test]
    fn the_last_ones_stay() {
        let mut recorder = Recorder::new(3, 0, "h".into(), None);
        let record = |seq| Record {
            group: "g".into(),
            seq,
            what: Fingerprint::new(Name::AllReduce, None, DType::F32, None, seq),
            bytes: 4 * seq,
            algorithm: Algorithm::Ring,
            issued: Time(seq),
            ended: None,
        };
        let entries: Vec<Entry> = (0..MOST_RECORDS as u64 + 10).map(|seq| recorder.issued(record(seq))).collect();
        recorder.ended(entries[9], Time(5000), true);
        recorder.ended(entries[10], Time(5001), false);
        recorder.ended(entries[1000], Time(5002), true);
        let record: Value = serde_json::from_str(&recorder.describe(&Stats::default(), Time(6000))).expect("JSON");
        let records = record["operations"].as_array().expect("a list");
        assert_eq!((records.len(), &records[0]["number"], &record["rank"]), (MOST_RECORDS, &json!(10), &json!(3)));
        let ended: Vec<_> = records.iter().filter(|record| !record["well"].is_null()).collect();
        assert_eq!(ended.len(), 2);
        assert_eq!((&ended[0]["number"], &ended[0]["well"]), (&json!(10), &json!(false)));
        assert_eq!((&ended[1]["number"], &ended[1]["ended_s_ago"]), (&json!(1000), &json!(998e-9)));
    }
}
