//! What is still to happen, by time.

use penstock_types::Time;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Events by time. Events for the same time happen in the order in which they were added, so a run does not depend on how a
/// heap breaks ties.
#[derive(Clone, Debug)]
pub struct Agenda<E> {
    heap: BinaryHeap<Entry<E>>,
    added: u64,
}

#[derive(Clone, Debug)]
struct Entry<E> {
    at: Time,
    serial: u64,
    event: E,
}

impl<E> Default for Agenda<E> {
    fn default() -> Agenda<E> {
        Agenda { heap: BinaryHeap::new(), added: 0 }
    }
}

impl<E> Agenda<E> {
    /// An event is to happen.
    pub fn add(&mut self, at: Time, event: E) {
        self.added += 1;
        self.heap.push(Entry { at, serial: self.added, event });
    }

    /// The time of the next event.
    #[must_use]
    pub fn next_at(&self) -> Option<Time> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// The next event, if its time has come.
    pub fn pop(&mut self, now: Time) -> Option<E> {
        if self.next_at()? > now {
            return None;
        }
        self.heap.pop().map(|entry| entry.event)
    }
}

/// The largest is what a [`BinaryHeap`] gives first: the earliest.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.serial).cmp(&(self.at, self.serial))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Earlier events come first, and events of one time in the order of their entry.
    #[test]
    fn order() {
        let mut agenda = Agenda::default();
        for (at, event) in [(5, 'c'), (3, 'a'), (5, 'd'), (3, 'b'), (9, 'e')] {
            agenda.add(Time(at), event);
        }
        assert_eq!(agenda.next_at(), Some(Time(3)));
        let due: String = std::iter::from_fn(|| agenda.pop(Time(5))).collect();
        assert_eq!((due.as_str(), agenda.next_at()), ("abcd", Some(Time(9))));
    }
}
