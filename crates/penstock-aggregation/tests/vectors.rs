//! The shipped aggregator does what `vectors/` say: bytes in, bytes out to whom, what is counted, and what it then holds.
//!
//! Its state is asked for from outside: copies of it are given packets whose outcome tells what a slot or the heart table
//! holds. Cases for the switch alone are its own tests' affair (tests/test_p4.py).

use penstock_aggregation::{
    Action, Admission, Aggregator, Child, Endpoint, Format, Header, Key, Kind, Limits, Refusal, Serial, Tenant, decode,
};
use serde_json::Value;
use std::path::Path;

/// Every case that names the software, step by step.
#[test]
fn stated_vectors() {
    let ran = run_file("aggregator.json");
    assert!(ran > 25, "{ran} cases");
}

/// What the Python model of the P4 pipeline makes of random packets is what the aggregator makes of them.
#[test]
fn random_vectors() {
    assert_eq!(run_file("random.json"), 6);
}

fn run_file(name: &str) -> usize {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../vectors").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let cases = file["cases"].as_array().unwrap();
    let mine = cases.iter().filter(|case| case["modes"].as_array().unwrap().iter().any(|mode| mode == "software"));
    mine.map(|case| {
        run(case, false);
        // Also as daemons open jobs, where a kept result or a question makes no difference.
        let steps = case["steps"].as_array().unwrap();
        if !steps
            .iter()
            .any(|step| step["bytes"].is_string() && matches!(unhex(&step["bytes"]).get(3), Some(2 | 5..=9)))
        {
            run(case, true);
        }
    })
    .count()
}

fn run(case: &Value, results: bool) {
    let mut node = fresh();
    let mut tenants: Vec<Tenant> = Vec::new();
    for (number, step) in case["steps"].as_array().unwrap().iter().enumerate() {
        let at = format!("{}, step {number}, {}", case["name"], step["what"]);
        if step["open"].is_object() {
            let tenant = tenant_of(&step["open"]);
            let tenant = Tenant { results: results || tenant.results, ..tenant };
            let outcome = node.open(tenant.clone());
            assert_eq!(outcome.is_err(), step["refused"].as_bool().unwrap(), "{at}: {outcome:?}");
            match outcome {
                Ok(()) => {
                    tenants.retain(|other| other.job != tenant.job);
                    tenants.push(tenant);
                }
                Err(reason) => assert!(matches!(reason, Admission::Epoch(_)), "{at}: {reason}"),
            }
        } else if let Some(job) = step["close"].as_u64() {
            node.close(job as u32);
        } else if step["restart"].is_boolean() {
            node = fresh();
        } else {
            let tenant =
                tenants.iter().find(|tenant| u64::from(tenant.job) == step["job"]).expect("a job that was opened");
            packet(&mut node, step, tenant.job, &at);
            check_slots(&node, step, tenant, &at);
            check_heart(&node, step, tenant, &at);
        }
    }
}

fn fresh() -> Aggregator {
    Aggregator::new(Limits { jobs: 4, slots: 64, memory_bytes: 1 << 20 })
}

/// One packet: to whom what is sent, and what is counted.
fn packet(node: &mut Aggregator, step: &Value, job: u32, at: &str) {
    let bytes = unhex(&step["bytes"]);
    let before = tally(node, job);
    let mut out: Vec<(u32, Vec<u8>)> = match node.handle_packet(endpoint(&step["from"]), &bytes) {
        Ok(Action::Send { to, header, payload }) => {
            to.iter().map(|to| (to.0, [&header[..], payload].concat())).collect()
        }
        Ok(Action::Relay { to }) => to.iter().map(|to| (to.0, bytes.clone())).collect(),
        Ok(Action::Nothing) | Err(_) => Vec::new(),
    };
    out.sort();
    let sends = unhex(&step["sends"]);
    let mut expected: Vec<(u32, Vec<u8>)> =
        step["to"].as_array().unwrap().iter().map(|to| (endpoint(to).0, sends.clone())).collect();
    expected.sort();
    assert_eq!(out, expected, "{at}: what it sends");
    let mut counts: Vec<&str> = step["counts"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    counts.sort_unstable();
    assert_eq!(difference(&before, &tally(node, job)), counts, "{at}: what it counts");
}

/// Every slot of the job, by what copies of the node make of further blocks.
fn check_slots(node: &Aggregator, step: &Value, tenant: &Tenant, at: &str) {
    let slots = step["slots"].as_array().unwrap();
    for index in 0..tenant.window {
        let Some(slot) = slots.iter().find(|slot| slot["slot"] == index) else {
            // An empty slot takes any block. One with a tag would refuse at least one of four that lie around the circle.
            for quarter in 0..4 {
                let bytes =
                    push(tenant, 0, Serial(index + (quarter << 30)), Format::I32, 0, &vec![0; tenant.block_bytes]);
                let (counts, _) = probe(node, tenant, &[(0, bytes)]);
                let complete: &[&str] = if tenant.children.len() == 1 { &["added", "completed"] } else { &["added"] };
                assert_eq!(counts, complete, "{at}: slot {index} should be empty");
            }
            continue;
        };
        let seq = Serial(slot["seq"].as_u64().unwrap() as u32);
        let format = match slot["format"].as_u64().unwrap() {
            1 => Format::I32,
            2 => Format::I16,
            3 => Format::Exponents,
            4 => Format::F32,
            other => panic!("{at}: format {other}"),
        };
        let exponent = slot["exponent"].as_i64().unwrap() as i16;
        let total = slot["sum"].is_string().then(|| unhex(&slot["sum"]));
        let length = total.as_ref().map_or(tenant.block_bytes, Vec::len);
        // What changes no sum.
        let neutral = match format {
            Format::Exponents => i16::MIN.to_be_bytes().repeat(length / 2),
            _ => vec![0; length],
        };
        let flags = slot["flags"].as_u64().unwrap_or(0) as u8;
        let block = |child: usize| {
            let header = Header { format, exponent, seq, flags, ..header(tenant, child) };
            (child, [&header.encode(&neutral, tenant.key.as_ref())[..], &neutral].concat())
        };
        let children = slot["children"].as_array().unwrap();
        let is_in = |child: usize| children.iter().any(|one| *one == child);
        for child in 0..tenant.children.len() {
            let (counts, _) = probe(node, tenant, &[block(child)]);
            assert_eq!(counts.contains(&"duplicate"), is_in(child), "{at}: slot {index}, child {child}: {counts:?}");
        }
        let Some(total) = total else { continue };
        let missing: Vec<_> = (0..tenant.children.len()).filter(|child| !is_in(*child)).map(block).collect();
        let blocks = if missing.is_empty() { vec![block(0)] } else { missing };
        let (_, sent) = probe(node, tenant, &blocks);
        let sent = sent.unwrap_or_else(|| panic!("{at}: slot {index} brings no sum"));
        let sum = decode(&sent).unwrap();
        assert_eq!(
            (sum.header.seq, sum.header.format, sum.header.exponent),
            (seq, format, exponent),
            "{at}: slot {index}"
        );
        assert_eq!(sum.payload, total, "{at}: slot {index}: its sum");
    }
}

/// The heart table: with all others far ahead, the minimum that goes up is what one child has said.
fn check_heart(node: &Aggregator, step: &Value, tenant: &Tenant, at: &str) {
    for (child, heard) in step["heart"].as_array().unwrap().iter().enumerate() {
        let mut others: Vec<usize> = (0..tenant.children.len()).filter(|other| *other != child).rev().collect();
        let number = |of: usize| Serial(heard[of].as_u64().unwrap_or(0) as u32);
        let beat = |who: usize, ack: Serial, credit: Serial| {
            let header = Header { kind: Kind::HeartbeatUp, ack, credit, ..header(tenant, who) };
            (who, header.encode(&[], tenant.key.as_ref()).to_vec())
        };
        let ahead = |who: usize| beat(who, number(0).plus(1 << 20), number(1).plus(1 << 20));
        let mut beats: Vec<_> = others.drain(..).map(ahead).collect();
        if heard.is_array() && child == 0 {
            // The first child's own, an old one, lets the minimum go up.
            beats.push(beat(0, number(0).plus(u32::MAX), number(1).plus(u32::MAX)));
        }
        let (_, sent) = probe(node, tenant, &beats);
        let minimum = sent.map(|sent| decode(&sent).unwrap().header).map(|header| (header.ack, header.credit));
        let expected = heard.is_array().then(|| (number(0), number(1)));
        assert_eq!(minimum, expected, "{at}: what child {child} has said");
    }
}

/// What a copy of the node counts, and sends last, when it is given these.
fn probe(node: &Aggregator, tenant: &Tenant, packets: &[(usize, Vec<u8>)]) -> (Vec<&'static str>, Option<Vec<u8>>) {
    let mut copy = node.clone();
    let before = tally(&copy, tenant.job);
    let mut sent = None;
    for (child, bytes) in packets {
        sent = match copy.handle_packet(tenant.children[*child].endpoint, bytes) {
            Ok(Action::Send { header, payload, .. }) => Some([&header[..], payload].concat()),
            _ => None,
        };
    }
    (difference(&before, &tally(&copy, tenant.job)), sent)
}

fn push(tenant: &Tenant, child: usize, seq: Serial, format: Format, exponent: i16, block: &[u8]) -> Vec<u8> {
    let header = Header { format, exponent, seq, ..header(tenant, child) };
    [&header.encode(block, tenant.key.as_ref())[..], block].concat()
}

fn header(tenant: &Tenant, child: usize) -> Header {
    Header {
        kind: Kind::Push,
        job: tenant.job,
        epoch: tenant.epoch,
        format: Format::None,
        flags: 0,
        seq: Serial(0),
        ack: Serial(0),
        credit: Serial(0),
        exponent: 0,
        workers: tenant.children[child].workers,
    }
}

const EVENTS: [&str; 6] = ["added", "completed", "repeated", "relayed", "named", "abandoned"];

/// The counters of a job and of unauthenticated senders in one, by name.
fn tally(node: &Aggregator, job: u32) -> Vec<(&'static str, u64)> {
    let mine = node.counters(job).copied().unwrap_or_default();
    let events = [mine.added, mine.completed, mine.repeated, mine.relayed, mine.named, mine.abandoned];
    // A switch has one counter for what its parser does not take, another version included.
    let name = |i| if Refusal::NAMES[i] == "version" { "malformed" } else { Refusal::NAMES[i] };
    let refused = (0..Refusal::COUNT).map(|i| (name(i), mine.refused[i] + node.unauthenticated()[i]));
    EVENTS.into_iter().zip(events).chain(refused).collect()
}

fn difference(before: &[(&'static str, u64)], after: &[(&'static str, u64)]) -> Vec<&'static str> {
    let pairs = before.iter().zip(after);
    let mut names: Vec<_> =
        pairs.flat_map(|((name, old), (_, new))| std::iter::repeat_n(*name, (new - old) as usize)).collect();
    names.sort_unstable();
    names
}

fn tenant_of(open: &Value) -> Tenant {
    let number = |name: &str| open[name].as_u64().unwrap_or_else(|| panic!("{name} of {open}"));
    let workers = |child: &Value| u64::from_str_radix(&child["workers"].as_str().unwrap()[2..], 16).unwrap();
    let children = open["children"].as_array().unwrap();
    Tenant {
        job: number("job") as u32,
        epoch: number("epoch") as u16,
        key: open["key"].is_string().then(|| Key(unhex(&open["key"]).try_into().unwrap())),
        window: number("window") as u32,
        block_bytes: number("block_bytes") as usize,
        floats: open["floats"].as_bool().unwrap(),
        results: open["results"].as_bool().unwrap_or(false),
        apart: open["apart"].as_bool().unwrap_or(false),
        parent: endpoint(&open["parent"]),
        server: None,
        name: children.iter().fold(0, |all, child| all | workers(child)),
        children: children
            .iter()
            .map(|child| Child { endpoint: endpoint(&child["link"]), workers: workers(child) })
            .collect(),
    }
}

fn endpoint(value: &Value) -> Endpoint {
    Endpoint(value.as_u64().expect("an endpoint") as u32)
}

fn unhex(value: &Value) -> Vec<u8> {
    let text = value.as_str().expect("hexadecimal");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}
