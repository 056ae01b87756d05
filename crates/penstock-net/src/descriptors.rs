//! File descriptors: what to do when they run out, and how to get enough of them beforehand.

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;

/// What a loop does after `accept` has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// No connection waits to be accepted.
    Nothing,
    /// This connection is lost; there may be others.
    Next,
    /// The machine lacks descriptors or memory. The connection still waits, so the loop must wait too, or it would retry
    /// without a pause.
    Later,
    /// The listener was shut down.
    End,
}

/// What follows from an error of `accept`. Only the listener's own end is a reason to stop accepting.
#[must_use]
pub fn after_accept(error: &io::Error) -> After {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::AGAIN) => After::Nothing,
        Some(Errno::INVAL | Errno::BADF) => After::End,
        // Linux reports errors of the network on this connection here (accept(2)); EPERM comes from a firewall.
        Some(
            Errno::INTR
            | Errno::CONNABORTED
            | Errno::PERM
            | Errno::NETDOWN
            | Errno::PROTO
            | Errno::NOPROTOOPT
            | Errno::HOSTDOWN
            | Errno::NONET
            | Errno::HOSTUNREACH
            | Errno::OPNOTSUPP
            | Errno::NETUNREACH
            | Errno::TIMEDOUT,
        ) => After::Next,
        _ => After::Later,
    }
}

/// Whether a system call failed for lack of descriptors or memory, of which some may become free.
#[must_use]
pub fn is_shortage(error: &io::Error) -> bool {
    let lacking = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::NOSPC];
    error.raw_os_error().is_some_and(|number| lacking.contains(&Errno::from_raw_os_error(number)))
}

/// Makes sure that this process may open `more` descriptors: raises the soft limit up to the hard one, but no further than
/// needed. Python's `subprocess`, for one, takes longer under a high limit.
///
/// # Errors
/// A text for users: how many are needed, and how many are allowed.
pub fn make_room(more: usize) -> Result<(), String> {
    let limits = getrlimit(Resource::Nofile);
    let Some(soft) = limits.current else { return Ok(()) };
    // Without /proc, assumes as many open descriptors as an interpreter with torch has.
    let open = std::fs::read_dir("/proc/self/fd").map_or(128, Iterator::count) as u64;
    let needed = open + more as u64 + SPARE;
    let Some(wanted) = raised(soft, limits.maximum, needed) else { return Ok(()) };
    if wanted > soft {
        let limits = Rlimit { current: Some(wanted), maximum: limits.maximum };
        setrlimit(Resource::Nofile, limits)
            .map_err(|error| format!("the limit of {soft} cannot be raised: {error}"))?;
        log::info!("penstock: the limit of open files is raised from {soft} to {wanted}");
    }
    if wanted < needed {
        return Err(format!("{needed} open files are needed, and at most {wanted} are allowed"));
    }
    Ok(())
}

/// The soft limit to set, if the present one is too low; it may be less than what is needed.
fn raised(soft: u64, hard: Option<u64>, needed: u64) -> Option<u64> {
    (soft < needed).then(|| hard.map_or(needed, |hard| needed.min(hard)).max(soft))
}

/// For what the rest of the process opens in the meantime.
const SPARE: u64 = 128;

#[cfg(test)]
mod tests {
    use super::*;

    /// The limit is raised where it is too low, by no more than is needed, and not beyond the hard limit.
    #[test]
    fn limits() {
        for (soft, hard, needed, expected) in [
            (1024, Some(4096), 1024, None),
            (1024, Some(4096), 1025, Some(1025)),
            (1024, Some(4096), 5000, Some(4096)),
            (1024, Some(1024), 5000, Some(1024)),
            (1024, None, 5000, Some(5000)),
        ] {
            assert_eq!(raised(soft, hard, needed), expected);
        }
    }

    /// Only the end of the listener ends a loop, and only what others may give back is waited for.
    #[test]
    fn errors_of_accept() {
        let after = |error: Errno| after_accept(&io::Error::from(error));
        assert_eq!([after(Errno::AGAIN), after(Errno::INVAL)], [After::Nothing, After::End]);
        for error in [Errno::INTR, Errno::CONNABORTED, Errno::PERM, Errno::NETUNREACH] {
            assert_eq!((after(error), is_shortage(&error.into())), (After::Next, false), "{error}");
        }
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM] {
            assert_eq!((after(error), is_shortage(&error.into())), (After::Later, true), "{error}");
        }
        assert_eq!(after_accept(&io::Error::other("unknown")), After::Later);
    }
}
