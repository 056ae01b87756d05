//! Results that lie in the slots of their sums, for children that lose them.

use super::slot::Slot;
use super::{Decision, Table};
use crate::asks_again;
use crate::packet::{FLAG_FULL, HEADER_BYTES, Header, Kind, Packet};
use crate::rules::{Refusal, Rule, Rules};

impl Table {
    /// Keeps a result for children that lose it. A result that cannot be kept is only relayed.
    pub(super) fn keep(&mut self, packet: &Packet<'_>, bytes: &[u8], rules: Rules) {
        let Packet { header, payload, .. } = packet;
        let (true, Ok(index)) = (self.tenant.results, self.slot_of(header.seq)) else { return };
        let slot = &mut self.slots[index];
        let ahead = slot.ahead(header.seq, rules);
        if (ahead < 0 && rules.hold(Rule::Stale)) || payload.len() > self.tenant.block_bytes {
            return;
        }
        if ahead > 0 && slot.have != 0 && slot.have != self.all {
            self.counters.abandoned += 1;
        }
        *slot = Slot {
            tag: Some(header.seq),
            have: self.all,
            format: header.format,
            exponent: header.exponent,
            length: payload.len() as u16,
            is_result: true,
            flags: header.flags & FLAG_FULL,
            asked: 0,
        };
        self.results[index].copy_from_slice(&bytes[..HEADER_BYTES]);
        let start = self.start_of(index);
        self.memory[start..start + payload.len()].copy_from_slice(payload);
    }

    /// A child requests a result. If the result is not here, either blocks of children are missing, or this node requests it
    /// from the parent, once.
    pub(super) fn request(&mut self, child: usize, header: &Header, rules: Rules) -> Result<Decision, Refusal> {
        let index = self.slot_of(header.seq)?;
        let slot = &mut self.slots[index];
        let ahead = slot.ahead(header.seq, rules);
        if ahead < 0 {
            return Err(Refusal::Stale);
        }
        if ahead == 0 && slot.is_result {
            return Ok(Decision::Result { index, child });
        }
        let seq = header.seq;
        let kind = header.kind;
        if ahead > 0 {
            return Ok(Decision::Ask { kind, seq });
        }
        asks_again(&mut slot.asked, header.workers);
        Ok(match self.all & !slot.have {
            _ if slot.asked != header.workers => Decision::Nothing,
            0 => Decision::Ask { kind, seq },
            workers => {
                Decision::Missing { header: Header { kind: Kind::Missing, workers, flags: 0, ..*header }, child: None }
            }
        })
    }
}
