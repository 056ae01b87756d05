//! The card of a host is shared by its ranks: one word in shared memory tells them that one of them has urgent bytes to send, so that
//! the others' bulk gives way.
//!
//! An access is of one thread that sends: the event loop of a process, and each thread for aggregation, which so give way to each other,
//! too, as strictly as all messages of one thread do. Other processes wait for four fifths of the time at most: their bulk has to end
//! where somebody is urgent all the time.
//!
//! The word holds a time and who has written it. Nobody has to take it back: it ends by itself, also when its writer dies. Two
//! processes that are urgent at once overwrite each other's word, and neither gives way, since each sends what is urgent first.

use crate::clock::monotonic_ns;
use crate::fds::Fd;
use crate::memory::Mapped;
use penstock_stream::peer::PAUSE_MOST;
use penstock_types::{MILLISECOND, Time};
use rustix::fs::{FallocateFlags, FileType, Mode, OFlags};
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// One access to the word; without one, nobody gives way to anybody.
#[derive(Debug)]
pub struct Arbiter {
    word: Option<Mapped>,
    /// Who we are: a random number of this process's, and one of its accesses'.
    own: u64,
    limit: HoldLimit,
}

impl Arbiter {
    /// Without a word.
    #[must_use]
    pub fn none() -> Arbiter {
        Arbiter { word: None, own: 0, limit: HoldLimit::default() }
    }

    /// That of this user's processes in this network namespace.
    #[must_use]
    pub fn of_this_host() -> Arbiter {
        let opened = rustix::fs::stat("/proc/self/ns/net").map_err(io::Error::from).and_then(|namespace| {
            let name = format!("/dev/shm/penstock-urgent-{}-{}", rustix::process::getuid().as_raw(), namespace.st_ino);
            Arbiter::at(name.as_ref())
        });
        opened.unwrap_or_else(|error| {
            log::debug!("penstock: ranks of this host do not give way to each other's urgent messages: {error}");
            Arbiter::none()
        })
    }

    /// That in a file, which is made if it is not there. It must be this user's alone: whoever can write there can hold bulk up.
    pub(crate) fn at(path: &Path) -> io::Result<Arbiter> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = Fd::new(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        let found = rustix::fs::fstat(&file)?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile && found.st_nlink == 1;
        if !is_file || found.st_uid != rustix::process::getuid().as_raw() || found.st_mode & 0o077 != 0 {
            return Err(io::Error::other(format!("{} is another user's, or open to others", path.display())));
        }
        let bytes = rustix::param::page_size();
        // Where no memory is left the first access would end the process.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        let access = ACCESSES.fetch_add(1, Ordering::Relaxed) & ((1 << ACCESS_BITS) - 1);
        let own = (process() << ACCESS_BITS | access) & OWNERS;
        Ok(Arbiter { word: Some(Mapped::shared(&file, bytes)?), own, limit: HoldLimit::default() })
    }

    /// This process has urgent bytes under way, for so long if it does not say so again; at most [`CLAIM_MOST`].
    pub fn claim(&self, lasts: u64) {
        if let Some(word) = &self.word {
            let until = monotonic_ns() + lasts.min(CLAIM_MOST);
            word.epoch().store((until / UNIT) << OWNER_BITS | self.own, Ordering::Relaxed);
        }
    }

    /// What somebody else has urgently under way, by the caller's clock, on which it is `now`; `None`: nobody has anything.
    #[must_use]
    pub fn claimed(&self, now: Time) -> Option<Claim> {
        let word = self.word.as_ref()?.epoch().load(Ordering::Relaxed);
        if word & OWNERS == self.own {
            return None;
        }
        let left = ((word >> OWNER_BITS) * UNIT).saturating_sub(monotonic_ns());
        // A longer one is none of ours.
        let is_own = (word & OWNERS) >> ACCESS_BITS == self.own >> ACCESS_BITS;
        (1..=CLAIM_MOST).contains(&left).then(|| Claim { until: now.plus(left), is_own })
    }

    /// Whether what is not urgent may wait for others: for other processes that claim, and for other hosts' that ask this one to pause.
    pub fn may_hold(&mut self, now: Time) -> bool {
        self.limit.allows(now)
    }
}

/// Somebody has urgent bytes under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// When it ends, unless it is renewed.
    pub until: Time,
    /// Whether it is another thread of this process. What is not urgent waits for it without asking [`Arbiter::may_hold`].
    pub is_own: bool,
}

/// A random number, the same for all accesses of this process.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| {
        let mut drawn = [0; 8];
        getrandom::fill(&mut drawn).expect("the kernel has randomness");
        u64::from_ne_bytes(drawn)
    })
}

static ACCESSES: AtomicU64 = AtomicU64::new(0);

/// Bounds for how long messages wait for more urgent ones, so that they end where others are urgent all the time.
#[derive(Clone, Copy, Debug, Default)]
struct HoldLimit {
    /// When they were last asked to wait.
    last: Time,
    /// For how long they have waited, less four times as long as they have not.
    held: u64,
    /// They do not wait until then.
    rests: Time,
}

impl HoldLimit {
    /// Whether they may wait now, since somebody asks for it: for four fifths of the time, and 200 ms at a time.
    fn allows(&mut self, now: Time) -> bool {
        let passed = now.since(std::mem::replace(&mut self.last, now));
        if now < self.rests {
            return false;
        }
        // Nobody waits for longer than what was asked for last.
        let waited = passed.min(ASKED_MOST);
        self.held = (self.held + waited).saturating_sub(4 * (passed - waited));
        if self.held > HELD_MOST {
            (self.held, self.rests) = (0, now.plus(HELD_PAUSE));
            return false;
        }
        true
    }
}

const OWNER_BITS: u32 = 22;
/// Of these: which access of its process. A process that makes more in its life has some that do not give way to each other.
const ACCESS_BITS: u32 = 11;
const OWNERS: u64 = (1 << OWNER_BITS) - 1;
/// Times in the word are multiples of this: 42 bits last for nine years.
const UNIT: u64 = 1 << 16;
/// How long a claim lasts that is renewed with what is acknowledged; it costs the others' bulk this time at the end.
pub const CLAIM: u64 = 3 * MILLISECOND / 2;
/// No claim lasts longer.
pub const CLAIM_MOST: u64 = 4 * MILLISECOND;
/// For how long one claim, or one pause, makes others wait at most.
const ASKED_MOST: u64 = if PAUSE_MOST > CLAIM_MOST { PAUSE_MOST } else { CLAIM_MOST };
/// How long messages wait at most, and for how long they do not wait then.
const HELD_MOST: u64 = 200 * MILLISECOND;
const HELD_PAUSE: u64 = 50 * MILLISECOND;

#[cfg(test)]
mod tests {
    use super::*;

    /// However often others ask, messages wait for four fifths of the time at most.
    #[test]
    fn waiting_ends() {
        let mut limit = HoldLimit::default();
        let held = (1000..2000).filter(|ms| limit.allows(Time(ms * MILLISECOND))).count();
        assert!((780..=830).contains(&held), "held for {held} of 1000 ms");
    }

    /// Claims that are far apart use up nothing: what is not urgent leaves between them.
    #[test]
    fn rare_claims_are_obeyed() {
        for every in [40, 100, 220, 230, 240, 300] {
            let mut limit = HoldLimit::default();
            let asked = (1000..20_000u64).filter(|ms| ms % every < 10);
            let refused = asked.filter(|ms| !limit.allows(Time(ms * MILLISECOND))).count();
            assert_eq!(refused, 0, "of 10 ms in each {every}");
        }
    }

    /// What one process claims the others see for a few milliseconds, and itself never.
    #[test]
    fn claims_end_by_themselves() {
        let folder = std::env::temp_dir().join(format!("penstock-arbiter-{}", std::process::id()));
        let (one, other) = (Arbiter::at(&folder).expect("it is ours"), Arbiter::at(&folder).expect("it is there"));
        let now = Time(7);
        assert_eq!((one.claimed(now), other.claimed(now)), (None, None));
        one.claim(CLAIM_MOST);
        assert_eq!(one.claimed(now), None);
        let Claim { until, is_own } = other.claimed(now).expect("just claimed");
        assert!(is_own && until > now && until <= now.plus(CLAIM_MOST), "{until:?}");
        let stranger = Arbiter { own: one.own ^ (1 << ACCESS_BITS), ..Arbiter::at(&folder).expect("it is there") };
        let seen = std::iter::repeat_with(|| {
            one.claim(CLAIM_MOST);
            stranger.claimed(now)
        });
        assert!(seen.flatten().next().is_some_and(|claim| !claim.is_own), "another process");
        let began = monotonic_ns();
        while other.claimed(now).is_some() {
            assert!(monotonic_ns() - began < 10_000 * MILLISECOND, "a claim does not end");
            std::thread::yield_now();
        }
        // From another boot, or what somebody else has written.
        other.word.as_ref().expect("opened").epoch().store(u64::MAX - 5, Ordering::Relaxed);
        assert_eq!(one.claimed(now), None);
        std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o666)).expect("it is ours");
        assert!(Arbiter::at(&folder).is_err(), "everybody may write there");
        std::fs::remove_file(&folder).expect("it is ours");
    }
}
