//! The options of a daemon: one table, from which the program `penstock-node` and the verbs of Python's `penstock` take theirs.
//!
//! A value is text until [`Config::from_options`] reads it. So it means the same wherever it was written, and what cannot be read
//! is refused in the same words.

use crate::config::parse_bytes;
use crate::{Config, Role};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

/// An option of aggregators and servers.
#[derive(Debug)]
pub struct NodeOption {
    /// Without the dashes before it.
    pub name: &'static str,
    /// The name of the value in the help; `None` for a flag, which has no value.
    pub value: Option<&'static str>,
    /// The value where the option is not given; `None`: no value. `listen` has no default and must be given.
    pub default: Option<&'static str>,
    /// What the option does, as the help says it.
    pub help: &'static str,
    /// The roles that have the option.
    pub roles: &'static [Role],
    /// Parses a value into the configuration.
    read: fn(&mut Config, &str) -> Result<(), String>,
}

impl NodeOption {
    /// The options of a role, in the order of a help.
    pub fn of(role: Role) -> impl Iterator<Item = &'static NodeOption> {
        OPTIONS.iter().filter(move |option| option.roles.contains(&role))
    }

    /// The one of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static NodeOption> {
        OPTIONS.iter().find(|option| option.name == name)
    }

    /// Whether a value can be read.
    ///
    /// # Errors
    /// Why not, without the option's name.
    pub fn check(&self, text: &str) -> Result<(), String> {
        (self.read)(&mut Config::new(Role::Aggregator, NOWHERE), text)
    }
}

impl Config {
    /// What options say. `given`: the names of those that are given, with their texts; of one without a value, any text.
    ///
    /// # Errors
    /// What cannot be read, with the option's name.
    pub fn from_options(role: Role, given: &[(&str, &str)]) -> Result<Config, String> {
        if let Some((name, _)) = given.iter().find(|(name, _)| NodeOption::of(role).all(|option| option.name != *name))
        {
            return Err(format!("--{name} is no option of the {}", role.name()));
        }
        let mut config = Config::new(role, NOWHERE);
        for option in NodeOption::of(role) {
            match given.iter().find(|(name, _)| *name == option.name) {
                Some((_, text)) => {
                    (option.read)(&mut config, text).map_err(|why| format!("--{}: {why}", option.name))?
                }
                None if option.name == "listen" => return Err(format!("--listen is missing: {}", option.help)),
                None => {}
            }
        }
        Ok(config)
    }
}

/// "ip:port" from an address or a name, with a port or without: `[::1]:80` has one, `::1` has none. Asks the system about names.
///
/// # Errors
/// Nothing is known by that name.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, Config::PORT));
    }
    let named = if text.contains(':') { text.to_string() } else { format!("{text}:{}", Config::PORT) };
    let found = named.to_socket_addrs().ok().and_then(|mut found| found.next());
    found.ok_or_else(|| format!("{text:?} is not an address, such as 10.0.0.1 or 10.0.0.1:{}", Config::PORT))
}

fn count(text: &str) -> Result<usize, String> {
    let count = text.parse::<usize>().ok().filter(|count| *count > 0);
    count.ok_or_else(|| format!("{text:?} is not a whole number of at least 1"))
}

fn seconds(text: &str, least: f64) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds >= least);
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| format!("{text:?} is not a number of seconds of at least {least}"))
}

/// The content of a file, without white space at its ends.
///
/// # Errors
/// It cannot be read, or is empty.
pub fn read_secret(path: impl AsRef<Path>) -> Result<Vec<u8>, String> {
    let path = path.as_ref();
    let read = std::fs::read(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    match read.trim_ascii() {
        [] => Err(format!("{} is empty", path.display())),
        secret => Ok(secret.to_vec()),
    }
}

const BOTH: &[Role] = &[Role::Aggregator, Role::Server];

/// In the place of an address that is still to be read.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), Config::PORT);

const OPTIONS: &[NodeOption] = &[
    NodeOption {
        name: "listen",
        value: Some("ADDR[:PORT]"),
        default: None,
        help: "What workers reach; port 7471 if none is given.",
        roles: BOTH,
        read: |config, text| parse_address(text).map(|address| config.listen = address),
    },
    NodeOption {
        name: "shards",
        value: Some("K"),
        default: Some("1"),
        help: "Threads, each with a UDP port of its own, from the port on: 1, 2, 4, 8 or 16.",
        roles: &[Role::Aggregator],
        read: |config, text| {
            // What else cannot be, `Config::check` says.
            config.shards =
                text.parse().map_err(|_| format!("{text:?} is not a number of threads: 1, 2, 4, 8 and 16 are"))?;
            Ok(())
        },
    },
    NodeOption {
        name: "slots",
        value: Some("N"),
        default: Some("65536"),
        help: "Slots of all jobs together; a job takes as many as its window.",
        roles: BOTH,
        read: |config, text| count(text).map(|slots| config.limits.slots = slots),
    },
    NodeOption {
        name: "memory",
        value: Some("BYTES"),
        default: Some("2G"),
        help: "Bytes of sums of all jobs together, such as 512M. The default is what the machine has, if that is less.",
        roles: BOTH,
        read: |config, text| parse_bytes(text).map(|bytes| config.limits.memory_bytes = bytes),
    },
    NodeOption {
        name: "jobs",
        value: Some("N"),
        default: Some("64"),
        help: "Jobs at a time.",
        roles: BOTH,
        read: |config, text| count(text).map(|jobs| config.limits.jobs = jobs),
    },
    NodeOption {
        name: "secret-file",
        value: Some("FILE"),
        default: None,
        help: "Who has this file's content may open jobs. Else PENSTOCK_SECRET or PENSTOCK_SECRET_FILE.",
        roles: BOTH,
        read: |config, text| read_secret(text).map(|secret| config.secret = Some(secret)),
    },
    NodeOption {
        name: "no-offloads",
        value: None,
        default: None,
        help: "Without GSO and GRO: every packet is one on every interface.",
        roles: BOTH,
        read: |config, _| {
            config.offloads = false;
            Ok(())
        },
    },
    NodeOption {
        name: "buffer",
        value: Some("BYTES"),
        default: Some("16M"),
        help: "The kernel's receive buffer of each socket.",
        roles: BOTH,
        read: |config, text| parse_bytes(text).map(|bytes| config.buffer_bytes = bytes),
    },
    NodeOption {
        name: "forget-after",
        value: Some("SECONDS"),
        default: Some("60"),
        help: "Seconds of silence after which a job is closed.",
        roles: BOTH,
        read: |config, text| seconds(text, 0.1).map(|time| config.forget_after = time),
    },
    NodeOption {
        name: "drain-timeout",
        value: Some("SECONDS"),
        default: Some("10"),
        help: "Seconds that SIGTERM leaves to sums that are half done.",
        roles: BOTH,
        read: |config, text| seconds(text, 0.0).map(|time| config.drain_timeout = time),
    },
    NodeOption {
        name: "drop",
        value: Some("RATE"),
        default: None,
        help: "For tests: the share of received packets to throw away.",
        roles: BOTH,
        read: |config, text| {
            let rate = text.parse::<f64>().ok().filter(|rate| (0.0..1.0).contains(rate));
            let rate = rate.ok_or_else(|| format!("{text:?} is not a share of at least 0 and below 1"))?;
            config.drop = Some((rate, 0));
            Ok(())
        },
    },
    // Behind the option that it belongs to.
    NodeOption {
        name: "seed",
        value: Some("N"),
        default: Some("0"),
        help: "For tests: which packets --drop takes.",
        roles: BOTH,
        read: |config, text| {
            let seed = text.parse().map_err(|_| format!("{text:?} is not a whole number from 0 to 2^64 - 1"))?;
            config.drop = config.drop.map(|(rate, _)| (rate, seed));
            Ok(())
        },
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// What is not given is as the table says: its defaults are those of a configuration.
    #[test]
    fn defaults() {
        let of = |config: &Config| {
            let Config { limits, buffer_bytes, forget_after, drain_timeout, drop, shards, .. } = config;
            let limits = (limits.slots, limits.memory_bytes, limits.jobs);
            (
                limits,
                *buffer_bytes,
                *forget_after,
                *drain_timeout,
                *drop,
                *shards,
                config.offloads,
                config.secret.clone(),
            )
        };
        for role in [Role::Aggregator, Role::Server] {
            let mut texts = vec![("listen", "127.0.0.1")];
            texts.extend(NodeOption::of(role).filter_map(|option| Some((option.name, option.default?))));
            assert!(texts.len() > 7);
            let listen = "127.0.0.1:7471".parse().unwrap();
            for texts in [&texts[..], &texts[..1]] {
                let read = Config::from_options(role, texts).unwrap();
                assert_eq!((read.role, read.listen), (role, listen));
                assert_eq!(of(&read), of(&Config::new(role, listen)));
            }
        }
    }

    /// Every option says what it says, in any order of its own.
    #[test]
    fn values() {
        let texts = [
            ("seed", "9"),
            ("drop", "0.25"),
            ("drain-timeout", "0"),
            ("forget-after", "0.5"),
            ("buffer", "64K"),
            ("no-offloads", ""),
            ("jobs", "3"),
            ("memory", "2M"),
            ("slots", "16"),
            ("shards", "4"),
            ("listen", "[::1]:80"),
        ];
        let read = Config::from_options(Role::Aggregator, &texts).unwrap();
        assert_eq!((read.listen, read.shards), ("[::1]:80".parse().unwrap(), 4));
        assert_eq!((read.limits.slots, read.limits.memory_bytes, read.limits.jobs), (16, 2 << 20, 3));
        assert_eq!((read.offloads, read.buffer_bytes, read.drop), (false, 1 << 16, Some((0.25, 9))));
        assert_eq!((read.forget_after, read.drain_timeout), (Duration::from_millis(500), Duration::ZERO));
        // A seed alone drops nothing.
        let read = Config::from_options(Role::Server, &[("listen", "::1"), ("seed", "1")]).unwrap();
        assert_eq!(read.drop, None);
    }

    /// What cannot be read is refused by the option's name.
    #[test]
    fn what_cannot_be_read() {
        for (name, text) in [
            ("listen", "no such host"),
            ("listen", "10.1.2.3:99999999"),
            ("shards", "two"),
            ("slots", "0"),
            ("memory", "lots"),
            ("jobs", "-1"),
            ("secret-file", "/no/such/file"),
            ("forget-after", "0"),
            ("forget-after", "nan"),
            ("drain-timeout", "1e300"),
            ("drop", "1"),
            ("seed", "-1"),
        ] {
            let why = NodeOption::named(name).unwrap().check(text).expect_err(name);
            assert!(why.contains(text), "{name}: {why}");
            let refused = Config::from_options(Role::Aggregator, &[(name, text), ("listen", "127.0.0.1")]).err();
            assert_eq!(refused, Some(format!("--{name}: {why}")));
        }
        let refused = |role, given: &[(&str, &str)]| Config::from_options(role, given).err().unwrap();
        assert!(refused(Role::Server, &[]).contains("--listen"));
        assert!(refused(Role::Server, &[("listen", "::1"), ("shards", "2")]).contains("--shards"));
        assert!(refused(Role::Aggregator, &[("listen", "::1"), ("slot", "2")]).contains("--slot "));
    }
}
