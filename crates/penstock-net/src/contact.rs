//! How to reach a process: what it publishes through the store.

use penstock_stream::handshake::NodeKey;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;

/// What a process publishes, so that others can connect to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contact {
    /// The process.
    pub node: NodeKey,
    /// Its rank in the job, for messages.
    pub rank: u32,
    /// Its host's name, for people.
    pub host: String,
    /// Where it listens, an address an interface.
    pub tcp: Vec<SocketAddr>,
    /// The address of its [`crate::memory::MemoryEpoch`]. 0: it does not share memory.
    pub memory_epoch: u64,
    /// Its process number and PID namespace.
    pub process: Process,
}

/// A process number within its PID namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// The PID namespace. It is equal in processes that see each other under these numbers. 0: unknown.
    pub space: u64,
}

impl Process {
    /// This process.
    #[must_use]
    pub fn own() -> Process {
        // The namespace's inode is unique until the next boot, whose id is random.
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = boot.chars().filter(char::is_ascii_hexdigit).take(16).collect();
        let boot = u64::from_str_radix(&digits, 16).unwrap_or(0);
        let space = std::fs::metadata("/proc/self/ns/pid").map_or(0, |meta| meta.ino() ^ boot);
        Process { pid: std::process::id(), space }
    }

    /// Whether both are in one PID namespace.
    #[must_use]
    pub fn is_beside(&self, other: &Process) -> bool {
        self.space != 0 && self.space == other.space
    }
}

impl Contact {
    /// Text of one line: `2 <node hex> <rank> <host> <memory epoch hex> <address,address,...> <pid> <PID namespace hex>`.
    #[must_use]
    pub fn encode(&self) -> String {
        let node: String = self.node.iter().map(|byte| format!("{byte:02x}")).collect();
        let tcp: Vec<String> = self.tcp.iter().map(ToString::to_string).collect();
        let host: String = self.host.chars().filter(|c| !c.is_whitespace()).collect();
        let Process { pid, space } = self.process;
        format!("2 {node} {} {host} {:x} {} {pid} {space:x}", self.rank, self.memory_epoch, tcp.join(","))
    }

    /// Reads what [`Contact::encode`] wrote.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn decode(text: &str) -> Result<Contact, String> {
        let bad = || format!("not a Penstock contact: {text:?}");
        let fields: Vec<&str> = text.split(' ').collect();
        let (&version, rest) = fields.split_first().ok_or_else(bad)?;
        if version != "2" && version.parse::<u32>().is_ok() {
            return Err(format!(
                "a contact of format {version}; this Penstock reads format 2: install the same version"
            ));
        }
        let [node, rank, host, memory_epoch, tcp, pid, space] = *rest else { return Err(bad()) };
        if node.len() != 32 || !node.is_ascii() {
            return Err(bad());
        }
        let mut key = [0u8; 16];
        for (at, byte) in key.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&node[2 * at..2 * at + 2], 16).map_err(|_| bad())?;
        }
        Ok(Contact {
            node: key,
            rank: rank.parse().map_err(|_| bad())?,
            host: host.to_owned(),
            tcp: tcp
                .split(',')
                .filter(|address| !address.is_empty())
                .map(|address| address.parse().map_err(|_| bad()))
                .collect::<Result<_, _>>()?,
            memory_epoch: u64::from_str_radix(memory_epoch, 16).map_err(|_| bad())?,
            process: Process {
                pid: pid.parse().map_err(|_| bad())?,
                space: u64::from_str_radix(space, 16).map_err(|_| bad())?,
            },
        })
    }

    /// The abstract UNIX socket on which processes of the same host reach this one. Abstract names belong to a network
    /// namespace, so two emulated hosts on one machine do not see each other's.
    #[must_use]
    pub fn local_name(node: &NodeKey) -> String {
        let node: String = node.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("\0penstock-{node}")
    }

    /// `rank 3 (10.0.0.2:4000)`.
    #[must_use]
    pub fn describe(&self) -> String {
        match self.tcp.first() {
            Some(address) => format!("rank {} ({address} on {})", self.rank, self.host),
            None => format!("rank {} (on {})", self.rank, self.host),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A contact survives encoding; an invalid text is an error that quotes it.
    #[test]
    fn round_trip() {
        let contact = Contact {
            node: [0xab; 16],
            rank: 7,
            host: "node-3".into(),
            tcp: vec!["10.0.0.2:4000".parse().unwrap(), "[::1]:5".parse().unwrap()],
            memory_epoch: 0x7fff_0000_1234,
            process: Process { pid: 99, space: 0xf00d_0000_0000_0001 },
        };
        assert_eq!(Contact::decode(&contact.encode()), Ok(contact));
        for bad in ["", "2 2 3", "x 2 3", "2 zz 1 h 0 1.2.3.4:5 1 1", "2 zz 1 h 0 1.2.3.4:5"] {
            assert!(Contact::decode(bad).is_err(), "{bad:?}");
        }
        let told = Contact::decode("1 ab 1 h 0 1.2.3.4:5").expect_err("an older one");
        assert!(told.contains("install the same version"), "{told}");
        let (own, again) = (Process::own(), Process::own());
        assert!(own.is_beside(&again) && own == again);
        assert!(!Process::default().is_beside(&Process::default()), "nobody knows");
    }
}
