//! `penstock-node`: the daemons without Python.

use clap::{Args, Parser, Subcommand};
use penstock_node::{Config, Daemon, Role, measure, parse_bytes};
use penstock_aggregation::Limits;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// In-network aggregation for Penstock: adds what workers push on its way to the server.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Adds what its children push, and forwards one sum.
    Aggregator {
        /// Threads, each with a UDP port of its own, from the port on: 1, 2, 4, 8 or 16.
        #[arg(long, default_value_t = 1)]
        shards: u32,
        #[command(flatten)]
        common: Common,
    },
    /// Commits sums and returns them: the end of a job's path.
    Server {
        #[command(flatten)]
        common: Common,
    },
    /// Measures one shard beside a loop that only receives and sends.
    #[command(hide = true)]
    Measure(measure::Options),
}

#[derive(Args)]
struct Common {
    /// Address, and port if not 7471: what workers reach.
    #[arg(long, value_name = "ADDR[:PORT]")]
    listen: String,
    /// Slots of all jobs together; a job takes as many as its window.
    #[arg(long, default_value_t = Config::SLOTS)]
    slots: usize,
    /// Bytes of sums of all jobs together, such as 512M.
    #[arg(long, default_value = "1G", value_parser = parse_bytes)]
    memory: usize,
    /// Jobs at a time.
    #[arg(long, default_value_t = Config::JOBS)]
    jobs: usize,
    /// Who has this file's content may open jobs. Also PENSTOCK_SECRET, or PENSTOCK_SECRET_FILE.
    #[arg(long, env = "PENSTOCK_SECRET_FILE")]
    secret_file: Option<PathBuf>,
    #[arg(long, env = "PENSTOCK_SECRET", hide = true, hide_env_values = true)]
    secret: Option<String>,
    /// Without GSO and GRO: every packet is one on every interface.
    #[arg(long)]
    no_offloads: bool,
    /// The kernel's buffers of each socket.
    #[arg(long, default_value = "16M", value_parser = parse_bytes)]
    buffer: usize,
    /// Seconds of silence after which a job is closed.
    #[arg(long, default_value = "60", value_parser = seconds)]
    forget_after: Duration,
    /// Seconds that SIGTERM leaves to sums that are half done.
    #[arg(long, default_value = "10", value_parser = seconds)]
    drain_timeout: Duration,
    /// For tests: the share of received packets to throw away.
    #[arg(long, value_name = "RATE")]
    drop: Option<f64>,
    /// For tests: which packets --drop takes.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    env_logger::Builder::new()
        .parse_filters(&std::env::var("PENSTOCK_LOG").unwrap_or_else(|_| "info".into()))
        .format_target(false)
        .init();
    let outcome = match cli.verb {
        Verb::Aggregator { shards, common } => serve(Role::Aggregator, shards, common),
        Verb::Server { common } => serve(Role::Server, 1, common),
        Verb::Measure(options) => measure::run(&options).map(|report| println!("{report}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("penstock-node: {message}");
            ExitCode::FAILURE
        }
    }
}

fn serve(role: Role, shards: u32, common: Common) -> Result<(), String> {
    let config = Config {
        shards,
        limits: Limits { jobs: common.jobs, slots: common.slots, memory_bytes: common.memory },
        secret: secret(&common)?,
        offloads: !common.no_offloads,
        buffer_bytes: common.buffer,
        forget_after: common.forget_after,
        drain_timeout: common.drain_timeout,
        drop: common.drop.map(|rate| (rate, common.seed)),
        ..Config::new(role, address(&common.listen)?)
    };
    let signals = Arc::new(AtomicUsize::new(0));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let signals = Arc::clone(&signals);
        // SAFETY: the handler adds to an atomic number, which is allowed in a signal handler.
        let registered = unsafe {
            signal_hook::low_level::register(signal, move || {
                signals.fetch_add(1, Ordering::Relaxed);
            })
        };
        registered.map_err(|error| format!("signals cannot be handled: {error}"))?;
    }
    // After the handlers: whoever reads that it listens may end it.
    let daemon = Daemon::start(config).map_err(|error| error.to_string())?;
    let mut draining = false;
    while !daemon.wait(LOOK) {
        let count = signals.load(Ordering::Relaxed);
        if count > 0 && !std::mem::replace(&mut draining, true) {
            log::info!("penstock: {} ends when no sum is half done; a second signal ends it at once", role.name());
            daemon.drain();
        }
        if count > 1 {
            return Err("ended at once".into());
        }
    }
    Ok(())
}

fn secret(common: &Common) -> Result<Option<Vec<u8>>, String> {
    if let Some(secret) = common.secret.as_ref().filter(|secret| !secret.is_empty()) {
        return Ok(Some(secret.clone().into_bytes()));
    }
    let Some(path) = common.secret_file.as_ref().filter(|path| !path.as_os_str().is_empty()) else {
        return Ok(None);
    };
    let read =
        std::fs::read(path).map_err(|error| format!("--secret-file {} cannot be read: {error}", path.display()))?;
    let secret = read.trim_ascii();
    if secret.is_empty() {
        Err(format!("--secret-file {} is empty", path.display()))
    } else {
        Ok(Some(secret.to_vec()))
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, Config::PORT));
    }
    let named = if text.contains(':') { text.to_string() } else { format!("{text}:{}", Config::PORT) };
    let found = named.to_socket_addrs().ok().and_then(|mut found| found.next());
    found.ok_or_else(|| format!("--listen {text}: an address is needed, such as 10.0.0.1 or 10.0.0.1:7471"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text:?} seconds are not a time to wait"))
}

/// How long a signal may go unnoticed.
const LOOK: Duration = Duration::from_millis(50);
