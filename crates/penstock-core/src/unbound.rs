//! Receives that wait for their place in a sequence.
//!
//! The `n`-th receive from a rank under a tag takes the `n`-th message of that rank. A receive from any source belongs to no
//! rank before it has a message. A receive that names a rank and was posted after it, under the same tag, cannot know before
//! that whether it takes that rank's next message or the one after it. So these receives queue, by tag: a message goes to the
//! receive that was posted first among those that fit, as in MPI.

use std::collections::{BTreeMap, VecDeque};

/// The rank of a receive that takes the next message of any rank ([`penstock_plan::Collective::Recv`]). It has no plan: a
/// receive gets its plan when it has its message.
pub const ANY_SOURCE: u32 = u32::MAX;

/// Receives without a message, by tag. Except while a group works on a queue, the first receive in it takes any source,
/// and no message for it has come.
#[derive(Debug)]
pub struct Unbound<T>(BTreeMap<u32, VecDeque<T>>);

impl<T> Default for Unbound<T> {
    fn default() -> Unbound<T> {
        Unbound(BTreeMap::new())
    }
}

impl<T> Unbound<T> {
    /// Whether a receive waits under this tag, so that later ones have to queue behind it.
    pub fn has(&self, tag: u32) -> bool {
        self.0.contains_key(&tag)
    }

    /// Puts a receive behind those under its tag.
    pub fn push(&mut self, tag: u32, receive: T) {
        self.0.entry(tag).or_default().push_back(receive);
    }

    /// The receive under a tag that was posted first.
    #[must_use]
    pub fn first(&self, tag: u32) -> Option<&T> {
        self.0.get(&tag)?.front()
    }

    /// The one that was posted last.
    #[must_use]
    pub fn last(&self, tag: u32) -> Option<&T> {
        self.0.get(&tag)?.back()
    }

    /// Takes the first one under a tag.
    pub fn pop(&mut self, tag: u32) -> Option<T> {
        let queue = self.0.get_mut(&tag)?;
        let first = queue.pop_front();
        if queue.is_empty() {
            self.0.remove(&tag);
        }
        first
    }

    /// All of them, by tag, in the order in which they were posted.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.values().flatten()
    }

    /// The same, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut().flatten()
    }

    /// Takes all of them.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::take(&mut self.0).into_values().flatten()
    }
}
