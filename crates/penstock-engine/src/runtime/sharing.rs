//! Memory that ranks of one host share.

use super::Runtime;
use penstock_net::Contact;
use penstock_net::fds::Fd;
use penstock_net::memory::{Mapping, Region, Remote};
use penstock_stream::frame::Reference;
use penstock_stream::{FrameError, Header};
use penstock_types::PeerId;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

pub(super) struct PeerInfo {
    pub(super) contact: Contact,
    pub(super) linked: bool,
    pub(super) local: bool,
    pub(super) pid: u32,
    pub(super) lost: Option<String>,
    /// The peer is lost because it has left the job in good order.
    pub(super) has_left: bool,
    /// Our regions that the peer knows; the descriptors of some have not been sent yet.
    pub(super) offered: HashMap<u64, Option<Fd>>,
    /// The peer's regions, by its numbers.
    pub(super) mappings: HashMap<u64, Arc<Mapping>>,
    /// Descriptors that the peer has passed for frames that have not come yet.
    pub(super) descriptors: VecDeque<Fd>,
}

impl PeerInfo {
    pub(super) fn new(contact: Contact) -> PeerInfo {
        PeerInfo {
            contact,
            linked: false,
            local: false,
            pid: 0,
            lost: None,
            has_left: false,
            offered: HashMap::new(),
            mappings: HashMap::new(),
            descriptors: VecDeque::new(),
        }
    }
}

impl Runtime {
    /// The memory that a reference frame names.
    pub(super) fn remote(&self, peer: PeerId, header: &Header, payload: &[u8]) -> Result<Remote, FrameError> {
        let bytes = payload.try_into().map_err(|_| FrameError::Length { kind: header.kind, length: header.length })?;
        let Reference { address, epoch, region } = Reference::decode(bytes);
        let info = &self.peers[peer as usize];
        if region == 0 {
            return Ok(Remote::Process { pid: info.pid, address, memory_epoch: info.contact.memory_epoch, epoch });
        }
        let mapping = info.mappings.get(&region);
        mapping
            .and_then(|mapping| Remote::mapped(mapping, address, header.total, epoch))
            .ok_or(FrameError::OutOfTurn("a reference to shared memory that is not there"))
    }

    /// Maps a region that a peer shares.
    pub(super) fn map(&mut self, peer: PeerId, region: u64, len: u64) -> Result<(), FrameError> {
        let info = &mut self.peers[peer as usize];
        let descriptor =
            info.descriptors.pop_front().ok_or(FrameError::OutOfTurn("an offer of memory without a descriptor"))?;
        if region == 0 || info.mappings.len() >= MAX_MAPPINGS {
            return Err(FrameError::OutOfTurn("more shared memory than can be mapped"));
        }
        let mapping = Mapping::new(descriptor, len).map_err(|error| {
            log::warn!("penstock: cannot map memory that {} shares: {error}", info.contact.describe());
            FrameError::OutOfTurn("shared memory that cannot be mapped")
        })?;
        info.mappings.insert(region, Arc::new(mapping));
        Ok(())
    }
}

/// The region that contains these bytes, and their offset in it.
pub(super) fn find(regions: &BTreeMap<u64, (u64, Region)>, address: u64, len: u64) -> Option<(u64, &Region, u64)> {
    let (_, (number, region)) = regions.range(..=address).next_back()?;
    Some((*number, region, region.offset(address, len)?))
}

/// How many descriptors a peer may pass before the frames to which they belong: one system call brings a few.
pub(super) const MAX_DESCRIPTORS: usize = 64;
/// How many regions are shared with a peer at a time; others are read as private memory. Well below the kernel's limit on
/// mappings (65530).
pub(super) const MAX_MAPPINGS: usize = 4096;
