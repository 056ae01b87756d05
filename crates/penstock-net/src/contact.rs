//! How to reach a process: what it publishes through the store.

use penstock_protocol::handshake::NodeKey;
use std::net::SocketAddr;

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
    /// Where its [`crate::memory::Landmark`] lies in its memory. 0: it does not take part in shared memory.
    pub landmark: u64,
}

impl Contact {
    /// Text of one line: `1 <node hex> <rank> <host> <landmark hex> <address,address,...>`.
    #[must_use]
    pub fn encode(&self) -> String {
        let node: String = self.node.iter().map(|byte| format!("{byte:02x}")).collect();
        let tcp: Vec<String> = self.tcp.iter().map(ToString::to_string).collect();
        let host: String = self.host.chars().filter(|c| !c.is_whitespace()).collect();
        format!("1 {node} {} {host} {:x} {}", self.rank, self.landmark, tcp.join(","))
    }

    /// Reads what [`Contact::encode`] wrote.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn decode(text: &str) -> Result<Contact, String> {
        let bad = || format!("not a Penstock contact: {text:?}");
        let fields: Vec<&str> = text.split(' ').collect();
        let [version, node, rank, host, landmark, tcp] = fields[..] else { return Err(bad()) };
        if version != "1" {
            return Err(format!(
                "a contact of format {version}; this Penstock reads format 1: install the same version"
            ));
        }
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
            landmark: u64::from_str_radix(landmark, 16).map_err(|_| bad())?,
        })
    }

    /// The abstract UNIX socket on which processes of the same host reach it. Abstract names belong to a network
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

    /// A contact survives the store; nonsense is an error that quotes it.
    #[test]
    fn round_trip() {
        let contact = Contact {
            node: [0xab; 16],
            rank: 7,
            host: "node-3".into(),
            tcp: vec!["10.0.0.2:4000".parse().unwrap(), "[::1]:5".parse().unwrap()],
            landmark: 0x7fff_0000_1234,
        };
        assert_eq!(Contact::decode(&contact.encode()), Ok(contact));
        for bad in ["", "1 2 3", "2 x y z 0 q", "1 zz 1 h 0 1.2.3.4:5"] {
            assert!(Contact::decode(bad).is_err(), "{bad:?}");
        }
    }
}
