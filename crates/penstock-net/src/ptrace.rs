//! Yama: the kernel module that decides which processes may read this one's memory, beyond having the same user.
//!
//! With `kernel.yama.ptrace_scope` 1, the default of Ubuntu and others, a process may read the memory of its descendants, and
//! of processes that have named it or one of its ancestors (`PR_SET_PTRACER`). The ranks of a host are siblings. So each names
//! the nearest process from which all of them descend: their launcher. Then that launcher may read them, and everything that
//! it has started.

use crate::contact::Process;
use std::io;
use std::sync::Once;

/// Which processes may read this one's memory where Yama restricts that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ptracer {
    /// The nearest common ancestor of the host's ranks, and its descendants.
    #[default]
    Launcher,
    /// Every process of the same user.
    Any,
    /// No further process.
    Nobody,
}

/// A process between a rank and the root of its PID namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ancestor {
    pub(crate) pid: u32,
    pub(crate) name: String,
}

/// What this process has named so far, and for which ranks.
#[derive(Debug)]
pub(crate) struct Yama {
    ptracer: Ptracer,
    /// `kernel.yama.ptrace_scope`; 0 without Yama.
    scope: u8,
    own: Process,
    ranks: Vec<u32>,
    /// The process that was named last.
    named: Option<u32>,
    /// Why no useful process is named.
    trouble: Option<String>,
}

impl Yama {
    pub(crate) fn new(ptracer: Ptracer) -> Yama {
        Yama::with(ptracer, read_scope(), Process::own())
    }

    fn with(ptracer: Ptracer, scope: u8, own: Process) -> Yama {
        let trouble = match (scope, ptracer) {
            (0 | 1, Ptracer::Launcher | Ptracer::Any) => None,
            (0 | 1, Ptracer::Nobody) => Some("PENSTOCK_PTRACER=0".into()),
            _ => Some(format!("only processes with CAP_SYS_PTRACE may with kernel.yama.ptrace_scope={scope}")),
        };
        Yama { ptracer, scope, own, ranks: Vec::new(), named: None, trouble }
    }

    /// Other ranks are about to read this process's memory: names the process that allows it. Ignores ranks on other hosts.
    pub(crate) fn meet(&mut self, ranks: impl IntoIterator<Item = Process>) {
        if self.scope != 1 || self.ptracer == Ptracer::Nobody {
            return;
        }
        let known = self.ranks.len();
        self.ranks.extend(ranks.into_iter().filter(|rank| rank.is_beside(&self.own)).map(|rank| rank.pid));
        if self.ranks.len() == known {
            return;
        }
        let chosen = match self.ptracer {
            Ptracer::Any => Ok(libc::PR_SET_PTRACER_ANY),
            _ => {
                let others: Vec<_> = self.ranks.iter().map(|pid| chain(*pid)).collect();
                choose(&chain(self.own.pid), &others).map(|pid| {
                    let is_new = self.named.replace(pid) != Some(pid);
                    if is_new {
                        log::debug!(
                            "penstock: processes below process {pid} may read this one's memory (PR_SET_PTRACER)"
                        );
                    }
                    libc::c_ulong::from(pid)
                })
            }
        };
        self.trouble =
            chosen.and_then(|tracer| set_ptracer(tracer).map_err(|error| format!("PR_SET_PTRACER: {error}"))).err();
    }

    /// Whether a refusal to read may end soon: the other rank names its readers when it joins, and may not have joined yet.
    pub(crate) fn may_end(&self, error: &io::Error, rank: &Process) -> bool {
        self.scope == 1 && self.trouble.is_none() && is_refusal(error) && rank.is_beside(&self.own)
    }

    /// Warns once that the kernel denies access, what that costs, and what helps if Yama is the reason.
    pub(crate) fn warn(&self, error: &io::Error, who: &str) {
        static TOLD: Once = Once::new();
        if let Some(warning) = self.warning(error, who) {
            TOLD.call_once(|| log::warn!("{warning}"));
        }
    }

    fn warning(&self, error: &io::Error, who: &str) -> Option<String> {
        if self.scope == 0 || !is_refusal(error) {
            return None;
        }
        let why = self.trouble.as_deref().unwrap_or("it has named nobody that this process descends from");
        let cure = match self.scope {
            1 => {
                "Let one launcher start the ranks of a host, as one user; or set PENSTOCK_PTRACER=any, which lets every \
                 process of this user read the ranks' memory"
            }
            _ => "Set it to 1 (sysctl), or give the ranks CAP_SYS_PTRACE",
        };
        Some(format!(
            "penstock: may not read the memory of {who}, since kernel.yama.ptrace_scope is {}, and {why}. Tensors go through the \
             local socket: two copies instead of one, and the algorithms for ranks on several hosts. {cure}",
            self.scope
        ))
    }
}

/// The process to name: the nearest of our ancestors that is an ancestor of all others too. Each chain begins with the rank
/// itself. Ancestors of a whole machine or a user's session are not named: that would allow nearly every process.
pub(crate) fn choose(own: &[Ancestor], others: &[Vec<Ancestor>]) -> Result<u32, String> {
    let is_common = |one: &&Ancestor| others.iter().all(|chain| chain.iter().any(|other| other.pid == one.pid));
    match own.iter().find(is_common) {
        None => Err("the ranks of this host have no ancestor in common that they see".into()),
        Some(Ancestor { pid, name }) if *pid == 1 || name == "systemd" => Err(format!(
            "the nearest common ancestor of the host's ranks is process {pid} ({name}), from which nearly everything descends"
        )),
        Some(one) => Ok(one.pid),
    }
}

/// The process and its ancestors, as far as `/proc` shows them.
fn chain(mut pid: u32) -> Vec<Ancestor> {
    let mut found = Vec::new();
    while pid != 0 && found.len() < LONGEST_CHAIN {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
        let Some((name, parent)) = read_stat(&String::from_utf8_lossy(&stat)) else { break };
        found.push(Ancestor { pid, name });
        pid = parent;
    }
    found
}

/// Name and parent of a process in `/proc/PID/stat`. The name stands in parentheses and may contain any character.
fn read_stat(text: &str) -> Option<(String, u32)> {
    let (before, after) = text.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    Some((name.to_owned(), after.split_ascii_whitespace().nth(1)?.parse().ok()?))
}

fn read_scope() -> u8 {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

fn set_ptracer(tracer: libc::c_ulong) -> io::Result<()> {
    // SAFETY: it changes who may trace this process, nothing in it.
    match unsafe { libc::prctl(libc::PR_SET_PTRACER, tracer) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn is_refusal(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EPERM)
}

/// Far beyond any launcher's; guards against processes that change while they are read.
const LONGEST_CHAIN: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn line(pids: &[(u32, &str)]) -> Vec<Ancestor> {
        pids.iter().map(|(pid, name)| Ancestor { pid: *pid, name: (*name).into() }).collect()
    }

    const ROOT: [(u32, &str); 3] = [(50, "bash"), (40, "systemd"), (1, "systemd")];

    fn below(pids: &[(u32, &str)]) -> Vec<Ancestor> {
        line(&[pids, &ROOT].concat())
    }

    /// The launcher is named: a parent, or what is above wrappers of the ranks; the nearest, not any above it.
    #[test]
    fn the_nearest_common_ancestor() {
        let ranks = [
            below(&[(100, "python"), (90, "torchrun")]),
            below(&[(101, "python"), (90, "torchrun")]),
            below(&[(102, "python"), (95, "numactl"), (90, "torchrun")]),
        ];
        for own in 0..3 {
            let others: Vec<_> = (0..3).filter(|other| *other != own).map(|other| ranks[other].clone()).collect();
            assert_eq!(choose(&ranks[own], &others), Ok(90));
            assert_eq!(choose(&ranks[own], &[]), Ok(ranks[own][0].pid), "nobody else");
        }
        // Started from one shell; and one started by another.
        assert_eq!(choose(&below(&[(100, "python")]), &[below(&[(101, "python")])]), Ok(50));
        assert_eq!(choose(&below(&[(100, "python")]), &[below(&[(101, "python"), (100, "python")])]), Ok(100));
        assert_eq!(choose(&below(&[(101, "python"), (100, "python")]), &[below(&[(100, "python")])]), Ok(100));
    }

    /// What everything descends from is not named, and neither is anybody where a chain cannot be seen.
    #[test]
    fn nobody_is_better_than_everybody() {
        let told = |own: Vec<Ancestor>, other: Vec<Ancestor>| choose(&own, &[other]).expect_err("too many");
        let orphan = line(&[(100, "python"), (1, "tini")]);
        assert!(told(orphan.clone(), line(&[(101, "python"), (1, "tini")])).contains("process 1 (tini)"));
        let session = |pid| line(&[(pid, "python"), (40, "systemd"), (1, "systemd")]);
        assert!(told(session(100), session(101)).contains("process 40 (systemd)"));
        assert!(told(orphan, Vec::new()).contains("no ancestor in common"));
    }

    /// Names of processes hold what they like.
    #[test]
    fn lines_of_proc() {
        assert_eq!(read_stat("77 (python) S 12 77 1 0 -1"), Some(("python".into(), 12)));
        assert_eq!(read_stat("77 (a) R (b) c) S 12 77"), Some(("a) R (b) c".into(), 12)));
        for bad in ["", "77 (python", "77 (python) S", "77 (python) S x"] {
            assert_eq!(read_stat(bad), None, "{bad:?}");
        }
        let own = chain(std::process::id());
        assert_eq!(own[0].pid, std::process::id());
        assert_eq!(own.get(1).map(|one| one.pid), Some(std::os::unix::process::parent_id()));
    }

    /// Only scope 1 knows PR_SET_PTRACER, and only for ranks of this PID namespace. A kernel without Yama says EINVAL, which is
    /// then the trouble; one with Yama takes our parent.
    #[test]
    fn whom_the_kernel_is_told() {
        let (own, parent) = (Process::own(), Process { pid: std::os::unix::process::parent_id(), ..Process::own() });
        let refused = io::Error::from_raw_os_error(libc::EPERM);
        let met = |ptracer, scope, rank: &Process| {
            let mut yama = Yama::with(ptracer, scope, own);
            yama.meet([*rank]);
            yama
        };
        let elsewhere = Process { space: own.space ^ 1, ..parent };
        for (ptracer, scope, rank) in [
            (Ptracer::Launcher, 0, parent),
            (Ptracer::Launcher, 1, elsewhere),
            (Ptracer::Nobody, 1, parent),
            (Ptracer::Any, 2, parent),
        ] {
            let yama = met(ptracer, scope, &rank);
            assert_eq!((yama.named, yama.ranks.len()), (None, 0));
            assert!(!yama.may_end(&refused, &rank));
        }
        let yama = met(Ptracer::Launcher, 1, &parent);
        assert_eq!(yama.named, Some(parent.pid), "our parent's nearest common ancestor with us is itself");
        if std::path::Path::new("/proc/sys/kernel/yama").exists() {
            assert!(yama.may_end(&refused, &parent) && met(Ptracer::Any, 1, &parent).trouble.is_none());
        } else {
            assert!(yama.trouble.as_ref().is_some_and(|text| text.contains("os error 22")), "{yama:?}");
            assert!(!yama.may_end(&refused, &parent));
        }
        assert!(!yama.may_end(&io::Error::from_raw_os_error(libc::ESRCH), &parent));
    }
    /// A refusal is told with what it costs and a cure for that scope; another error, or a kernel that restricts nothing, is not.
    #[test]
    fn refusals_are_told_with_a_cure() {
        let refused = io::Error::from_raw_os_error(libc::EPERM);
        let warning = |ptracer, scope| Yama::with(ptracer, scope, Process::own()).warning(&refused, "rank 3");
        for (scope, cure) in [(1, "PENSTOCK_PTRACER=any"), (2, "Set it to 1 (sysctl)"), (3, "Set it to 1 (sysctl)")] {
            let told = warning(Ptracer::Launcher, scope).expect("a refusal");
            for part in ["rank 3", "two copies", cure, &format!("ptrace_scope is {scope}")] {
                assert!(told.contains(part), "{part}: {told}");
            }
        }
        assert!(warning(Ptracer::Nobody, 1).expect("a refusal").contains("PENSTOCK_PTRACER=0"));
        assert_eq!(warning(Ptracer::Launcher, 0), None);
        let gone = io::Error::from_raw_os_error(libc::ESRCH);
        assert_eq!(Yama::with(Ptracer::Launcher, 1, Process::own()).warning(&gone, "rank 3"), None);
    }
}
