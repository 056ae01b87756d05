//! A daemon's configuration.

use penstock_aggregation::Limits;
use std::net::SocketAddr;
use std::time::Duration;

/// The kind of daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Adds blocks on their way.
    Aggregator,
    /// Commits sums at the end of the path.
    Server,
}

impl Role {
    /// The name in answers, metrics and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Aggregator => "aggregator",
            Role::Server => "server",
        }
    }
}

/// A daemon's configuration.
#[derive(Clone)]
pub struct Config {
    /// The kind of daemon.
    pub role: Role,
    /// Address of TCP and of the first shard's UDP port. With port 0, free ports are chosen.
    pub listen: SocketAddr,
    /// Threads, each with a UDP port of its own: a power of two, at most 16; 1 for a server.
    pub shards: u32,
    /// Limits for all jobs together.
    pub limits: Limits,
    /// The secret that clients need to open jobs; `None`: everybody who reaches the port may.
    pub secret: Option<Vec<u8>>,
    /// Whether UDP trains go through the kernel in one piece (GSO, GRO). Off for measurements that count packets on an
    /// interface.
    pub offloads: bool,
    /// The kernel's receive buffer of each socket. Too small: packets are lost at full rate although Credit allows them
    /// (`kernel_dropped`).
    pub buffer_bytes: usize,
    /// A job from which nothing came for this long is closed.
    pub forget_after: Duration,
    /// How long a daemon that was asked to end waits for its jobs.
    pub drain_timeout: Duration,
    /// For tests: the share of received packets to discard, and the seed that chooses them.
    pub drop: Option<(f64, u64)>,
}

impl Config {
    /// The default port.
    pub const PORT: u16 = 7471;
    /// Windows of 256 of 256 jobs.
    pub const SLOTS: usize = 65536;
    /// A server's job with racks of 32 and windows of 256 full blocks takes 1.2 GB while 16 racks are dead.
    pub const MEMORY_BYTES: usize = 2 << 30;
    /// A guess at what shares one node.
    pub const JOBS: usize = 64;
    /// Eight workers' windows of 64 full blocks, with the kernel's bookkeeping.
    pub const BUFFER_BYTES: usize = 16 << 20;
    /// A minute: longer than any pause of a job that lives, since its workers speak every 100 ms.
    pub const FORGET_AFTER: Duration = Duration::from_secs(60);
    /// A step of training.
    pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
    /// The most shards of a daemon: a port each.
    pub const MAX_SHARDS: u32 = 16;

    /// The defaults.
    #[must_use]
    pub fn new(role: Role, listen: SocketAddr) -> Config {
        Config {
            role,
            listen,
            shards: 1,
            limits: Limits {
                jobs: Config::JOBS,
                slots: Config::SLOTS,
                memory_bytes: usize::try_from(physical_memory())
                    .map_or(Config::MEMORY_BYTES, |all| all.min(Config::MEMORY_BYTES)),
            },
            secret: None,
            offloads: true,
            buffer_bytes: Config::BUFFER_BYTES,
            forget_after: Config::FORGET_AFTER,
            drain_timeout: Config::DRAIN_TIMEOUT,
            drop: None,
        }
    }

    /// Checks the configuration; the error names the option.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Config { role, shards, limits, drop, listen, .. } = self;
        if !shards.is_power_of_two() || *shards > Config::MAX_SHARDS {
            return Err(format!(
                "--shards {shards}: 1, 2, 4, 8 or 16 are possible, for SeqNums are divided among them"
            ));
        }
        if *role == Role::Server && *shards != 1 {
            return Err(format!(
                "--shards {shards}: a server has one; to use more cores, let several servers share a model"
            ));
        }
        if listen.port() != 0 && u32::from(listen.port()) + shards - 1 > 65535 {
            return Err(format!("--listen {listen} with {shards} shards needs ports beyond 65535"));
        }
        if limits.jobs == 0 || limits.slots == 0 || limits.memory_bytes == 0 {
            return Err("--jobs, --slots and --memory must be at least 1".into());
        }
        let physical = physical_memory();
        if limits.memory_bytes as u64 > physical {
            return Err(format!(
                "--memory {} is more than this machine has ({}): use less",
                human_bytes(limits.memory_bytes as u64),
                human_bytes(physical)
            ));
        }
        if drop.is_some_and(|(rate, _)| !(0.0..1.0).contains(&rate)) {
            return Err("--drop is a share of packets: at least 0 and below 1".into());
        }
        Ok(())
    }
}

/// Parses a number of bytes such as `4096`, `64K`, `512M`, `4G`, `1T`, in powers of 1024.
pub(crate) fn parse_bytes(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].trim().trim_end_matches(['i', 'B', 'b']).to_ascii_uppercase().as_str() {
        "" => Some(0),
        "K" => Some(10),
        "M" => Some(20),
        "G" => Some(30),
        "T" => Some(40),
        _ => None,
    };
    let bytes = digits.parse::<u64>().ok().zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    bytes
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| format!("{text:?} is not a number of bytes: 4096, 64K, 512M and 4G are"))
}

pub(crate) fn human_bytes(bytes: u64) -> String {
    let (unit, shift) = match bytes {
        0..=0x3ff => return format!("{bytes} bytes"),
        0x400..=0xf_ffff => ("KiB", 10),
        0x10_0000..=0x3fff_ffff => ("MiB", 20),
        _ => ("GiB", 30),
    };
    format!("{:.1} {unit}", bytes as f64 / f64::from(1u32 << shift))
}

fn physical_memory() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes are read as they are written in options, and nothing else is.
    #[test]
    fn sizes() {
        for (text, bytes) in
            [("4096", 4096), ("64K", 65536), (" 2MiB", 2 << 20), ("4G", 4 << 30), ("0", 0), ("1T", 1 << 40)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "1.5G", "4X", "99999999999G", "1 2"] {
            assert!(parse_bytes(text).unwrap_err().contains("is not a number of bytes"), "{text}");
        }
    }

    /// A configuration that cannot work is refused before anything starts, and the error names the option.
    #[test]
    fn options_that_cannot_be() {
        let good = Config::new(Role::Aggregator, "127.0.0.1:7471".parse().unwrap());
        assert_eq!(good.check(), Ok(()));
        let bad = |change: &dyn Fn(&mut Config)| {
            let mut config = good.clone();
            change(&mut config);
            config.check().unwrap_err()
        };
        assert!(bad(&|c| c.shards = 3).contains("--shards 3"));
        assert!(bad(&|c| c.shards = 32).contains("--shards 32"));
        assert!(bad(&|c| (c.role, c.shards) = (Role::Server, 2)).contains("several servers"));
        assert!(bad(&|c| (c.listen, c.shards) = ("127.0.0.1:65535".parse().unwrap(), 2)).contains("65535"));
        assert!(bad(&|c| c.limits.memory_bytes = 1 << 60).contains("more than this machine has"));
        assert!(bad(&|c| c.limits.jobs = 0).contains("--jobs"));
        assert!(bad(&|c| c.drop = Some((1.0, 0))).contains("--drop"));
        assert!(bad(&|c| c.drop = Some((f64::NAN, 0))).contains("--drop"));
    }
}
