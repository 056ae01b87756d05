//! Real daemons, real sockets: whatever happens on the way, every result of every worker equals the undisturbed sum.

mod cluster;

use cluster::{ANY, Branch, Cluster, Job, config, get, job_at};
use penstock_aggregation::{Format, Header, Key, Kind, Serial};
use penstock_net::datagrams::Datagrams;
use penstock_node::{Config, Role};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

fn aggregator(shards: u32) -> Config {
    Config { shards, ..config(Role::Aggregator) }
}

/// Formats, numbers of workers, shards, with a key and without, with offloads and without, and where bitmaps name workers.
#[test]
fn one_aggregator() {
    for (workers, format, shards, keyed, offloads, names_workers) in [
        (2, Format::I32, 1, false, true, false),
        (3, Format::I16, 2, true, true, true),
        (4, Format::F32, 2, false, false, false),
        (5, Format::Exponents, 1, true, false, true),
        (8, Format::I32, 2, true, true, true),
        (8, Format::F32, 4, true, true, false),
    ] {
        let key = keyed.then_some(Key([9; 16]));
        let job = Job { key, offloads, names_workers, ..Job::star(workers, format) };
        let node = Config { offloads, ..aggregator(shards) };
        let mut cluster = Cluster::start(Config { offloads, ..config(Role::Server) }, vec![node], &job);
        cluster.open(&job);
        cluster.run(&job, |_, _| ());
        let reply = job_at(cluster.places[0].0, job.number);
        assert_eq!(reply["completed"], job.blocks, "all sums went through the aggregator: {reply}");
        assert_eq!(reply["slots"], job.window);
        assert_eq!(reply["keyed"], keyed);
        for worker in 0..workers {
            let node = &reply["nodes"][worker + 1];
            assert_eq!(node["added"], job.blocks, "{node}");
            assert_eq!((&node["node"], &node["workers"]), (&"worker".into(), &worker.to_string().into()));
            assert_eq!(node["address"], cluster.sockets[worker].local_addr().to_string());
        }
        let server = job_at(cluster.server_at(), job.number);
        assert_eq!((&server["committed"], &server["bypassed"]), (&job.blocks.into(), &json!([])), "{server}");
    }
}

/// Racks below a core, with more shards below than above and the other way round, and a worker straight below the server.
#[test]
fn two_levels() {
    for (rack_shards, core_shards, format) in [(2, 1, Format::F32), (1, 4, Format::I32), (2, 2, Format::I16)] {
        let w = Branch::Worker;
        let racks = vec![Branch::Rack(1, vec![w(4), w(0), w(1)]), Branch::Rack(2, vec![w(2), w(5), w(3)])];
        let tree = vec![w(6), Branch::Rack(0, racks)];
        let job = Job { tree, key: Some(Key([1; 16])), ..Job::star(7, format) };
        let nodes = vec![aggregator(core_shards), aggregator(rack_shards), aggregator(rack_shards)];
        let mut cluster = Cluster::start(config(Role::Server), nodes, &job);
        cluster.open(&job);
        cluster.run(&job, |_, _| ());
        for (address, _) in &cluster.places {
            let reply = job_at(*address, job.number);
            assert_eq!(reply["completed"], job.blocks, "{reply}");
            assert!(reply["relayed"].as_u64().unwrap() >= u64::from(job.blocks), "results came back this way: {reply}");
        }
    }
}

/// Every twentieth packet that a daemon receives is thrown away, at two levels and at the server.
#[test]
fn five_percent_loss() {
    for (seed, format) in [(1u64, Format::I32), (2, Format::F32)] {
        let w = Branch::Worker;
        let racks = vec![Branch::Rack(1, vec![w(0), w(1)]), Branch::Rack(2, vec![w(2), w(3)])];
        let job = Job { tree: vec![Branch::Rack(0, racks)], patient: false, ..Job::star(4, format) };
        let lossy = |config: Config, more| Config { drop: Some((0.05, seed * 10 + more)), ..config };
        let nodes = (0..3).map(|i| lossy(aggregator(2), i)).collect();
        let mut cluster = Cluster::start(lossy(config(Role::Server), 7), nodes, &job);
        cluster.open(&job);
        cluster.run(&job, |_, _| ());
        let thrown: u64 = cluster
            .places
            .iter()
            .map(|(address, _)| get(*address, "/jobs")["socket"]["dropped_on_purpose"].as_u64().unwrap())
            .sum();
        assert!(thrown > 50, "seed {seed}: {thrown} packets were thrown away");
    }
}

/// An aggregator that starts anew twice in the middle, and is told of the job again, costs no result.
#[test]
fn an_aggregator_restarts() {
    let job = Job { blocks: 600, patient: false, ..Job::star(4, Format::I32) };
    let mut cluster = Cluster::start(config(Role::Server), vec![aggregator(2)], &job);
    cluster.open(&job);
    let mut restarts = 0;
    cluster.run(&job, |cluster, results| {
        if results > [600, 1500, u32::MAX][restarts] {
            restarts += 1;
            cluster.restart(&job, 0);
        }
    });
    assert_eq!(restarts, 2);
    let reply = job_at(cluster.places[0].0, job.number);
    assert!(reply["completed"].as_u64().unwrap() > 0, "the path was taken again: {reply}");
}

/// An aggregator that dies is passed by within a second, and the others' paths go on; the job ends as if nothing were.
#[test]
fn an_aggregator_dies() {
    let w = Branch::Worker;
    let tree = vec![Branch::Rack(0, vec![w(0), w(1)]), Branch::Rack(1, vec![w(2), w(3)])];
    let job = Job { tree, patient: false, ..Job::star(4, Format::F32) };
    let mut cluster = Cluster::start(config(Role::Server), vec![aggregator(1), aggregator(1)], &job);
    cluster.open(&job);
    let mut dead = None;
    let mut after = None;
    cluster.run(&job, |cluster, results| {
        if results > 400 && dead.is_none() {
            cluster.kill(0);
            dead = Some((std::time::Instant::now(), results));
        }
        // More than what was under way: a window of each worker.
        if let Some((at, before)) = dead
            && results > before + 4 * job.window
        {
            after.get_or_insert_with(|| at.elapsed());
        }
    });
    let after = after.expect("results came after its death");
    assert!(after.as_secs_f64() < 10.0, "on a loaded machine too: {after:?}");
    let server = job_at(cluster.server_at(), job.number);
    assert_eq!(server["bypassed"], json!([cluster.places[0].0.to_string()]), "and not the other one: {server}");
}

/// 70 workers: more than a bitmap of workers holds. Two racks below a row, and two workers straight below the server. A rack dies, then
/// the row above both; both come back, and are used again. Every result is the undisturbed sum, with floats added in the order of the
/// tree, and each time the server stands in for those that are dead, and no others.
#[test]
fn more_than_64_workers() {
    let racks = [0..34, 34..68].map(|rack: std::ops::Range<usize>| rack.map(Branch::Worker).collect());
    let [one, other] = racks;
    let row = Branch::Rack(0, vec![Branch::Rack(1, one), Branch::Rack(2, other)]);
    let tree = vec![row, Branch::Worker(68), Branch::Worker(69)];
    let job = Job {
        tree,
        patient: false,
        // Long enough that nodes return to the aggregators before it ends.
        blocks: 2000,
        window: 64,
        block_bytes: 64,
        key: Some(Key([5; 16])),
        ..Job::star(70, Format::F32)
    };
    let mut cluster = Cluster::start(config(Role::Server), vec![aggregator(2), aggregator(1), aggregator(2)], &job);
    cluster.open(&job);
    let bypassed = |cluster: &Cluster| -> Vec<usize> {
        let server = job_at(cluster.server_at(), job.number);
        let all = server["bypassed"].as_array().expect("a list").clone();
        (0..3).filter(|number| all.contains(&json!(cluster.places[*number].0.to_string()))).collect()
    };
    let mut seen = Vec::new();
    let mut stage = 0;
    cluster.run(&job, |cluster, results| {
        let share = results / job.workers as u32;
        match stage {
            0 if share > 60 => cluster.kill(1),
            1 if share > 140 => {
                seen.push(bypassed(cluster));
                cluster.kill(0);
            }
            2 if share > 230 => {
                seen.push(bypassed(cluster));
                cluster.restart(&job, 0);
                cluster.restart(&job, 1);
            }
            _ => return,
        }
        stage += 1;
    });
    assert_eq!(seen, [vec![1], vec![0, 1]], "by number");
    for number in 0..3 {
        let completed = job_at(cluster.places[number].0, job.number)["completed"].as_u64().unwrap();
        assert!(completed > 20, "aggregator {number} was used again: it has completed {completed} sums");
    }
}

/// Integers, of which blocks that are not finite travel as floats, at depth 2, with 5 % loss at every daemon: through aggregators, and past
/// dead ones. First a rack dies, or its row, or both at once; then the dead come back, and the others die.
#[test]
fn deaths_on_one_path() {
    for (seed, first, then) in [(1u64, &[1][..], &[0][..]), (2, &[0], &[1]), (3, &[0, 1], &[2])] {
        let w = Branch::Worker;
        let racks = vec![Branch::Rack(1, vec![w(0), w(1)]), Branch::Rack(2, vec![w(2), w(3)]), w(4)];
        let tree = vec![Branch::Rack(0, racks), w(5)];
        let job = Job { tree, patient: false, blocks: 1500, infinite: true, window: 32, ..Job::star(6, Format::I32) };
        let job = Job { block_bytes: 64, ..job };
        let lossy = |config: Config, more| Config { drop: Some((0.05, seed * 10 + more)), ..config };
        let nodes = (0..3).map(|i| lossy(aggregator(1 + i % 2), u64::from(i))).collect();
        let mut cluster = Cluster::start(lossy(config(Role::Server), 7), nodes, &job);
        cluster.open(&job);
        let mut stage = 0;
        cluster.run(&job, |cluster, results| {
            match (stage, results / 6) {
                (0, 200..) => first.iter().for_each(|dead| cluster.kill(*dead)),
                (1, 500..) => {
                    first.iter().for_each(|back| cluster.restart(&job, *back));
                    then.iter().for_each(|dead| cluster.kill(*dead));
                }
                _ => return,
            }
            stage += 1;
        });
        assert_eq!(stage, 2, "seed {seed}");
    }
}

/// Unauthenticated peers that send as much as they can, from unknown and from forged addresses, change nothing, and are counted.
#[test]
fn unauthenticated_peers_flood() {
    for key in [Some(Key([3; 16])), None] {
        let job = Job { key, blocks: 400, ..Job::star(4, Format::I32) };
        let mut cluster = Cluster::start(config(Role::Server), vec![aggregator(1)], &job);
        cluster.open(&job);
        let (node, server) = (cluster.places[0].0, cluster.server_at());
        let stop = AtomicBool::new(false);
        let flooded = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    flood(&job, [node, server]);
                    flooded.store(true, Ordering::Relaxed);
                }
            });
            while !flooded.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            cluster.run(&job, |_, _| ());
            stop.store(true, Ordering::Relaxed);
        });
        for address in [node, server] {
            let (refused, reply) = (get(address, "/jobs")["unauthenticated"].clone(), job_at(address, job.number));
            assert!(refused["malformed"].as_u64() > Some(0) && refused["job"].as_u64() > Some(0), "{refused}");
            assert!(reply["refused"][if key.is_some() { "key" } else { "sender" }].as_u64() > Some(0), "{reply}");
            assert!(reply["refused"]["epoch"].as_u64() > Some(0), "{reply}");
        }
    }
}

/// A few hundred packets: noise, another job's, another epoch's, and a worker's from an address that is not the worker's.
fn flood(job: &Job, to: [SocketAddr; 2]) {
    let mut sender = Datagrams::bind(ANY, true, 1 << 18).unwrap();
    for i in 0..200u32 {
        let header = |number, epoch| Header {
            kind: Kind::Push,
            job: number,
            epoch,
            format: job.format,
            flags: 0,
            seq: Serial(job.start.wrapping_add(i)),
            ack: Serial(job.start),
            credit: Serial(job.start.wrapping_add(15)),
            exponent: -7,
            workers: 1 << (i % 4),
        };
        let block = vec![i as u8; job.block_bytes];
        for to in to {
            sender.queue(to, &header(job.number, job.epoch).encode(&block, None), &block);
            sender.queue(to, &header(job.number, job.epoch - 1).encode(&block, job.key.as_ref()), &block);
            sender.queue(to, &header(job.number + 1, job.epoch).encode(&block, None), &block);
            sender.queue(to, &block, &block[..8]);
        }
    }
    sender.flush().unwrap();
}

/// Two jobs share one aggregator and one server, and neither sees the other.
#[test]
fn two_jobs() {
    let one = Job { number: 1, ..Job::star(3, Format::I32) };
    let two = Job { number: 2, key: Some(Key([2; 16])), ..Job::star(4, Format::F32) };
    let mut first = Cluster::start(config(Role::Server), vec![aggregator(2)], &one);
    first.open(&one);
    let mut second = Cluster {
        server: first.server.take(),
        aggregators: Vec::new(),
        configs: Vec::new(),
        places: first.places.clone(),
        sockets: (0..two.workers).map(|_| Datagrams::bind(ANY, true, 4 << 20).unwrap()).collect(),
        failures: Vec::new(),
    };
    second.open(&two);
    let server = second.server_at();
    std::thread::scope(|scope| {
        let theirs = scope.spawn(|| {
            second.run(&two, |_, _| ());
            second
        });
        first.run_at(server, &one, |_, _| ());
        let second = theirs.join().unwrap();
        for (job, blocks) in [(1, one.blocks), (2, two.blocks)] {
            assert_eq!(job_at(first.places[0].0, job)["completed"], blocks);
            assert_eq!(job_at(second.server_at(), job)["committed"], blocks);
        }
    });
}
