//! Opens and closes jobs, and answers requests: everything but packets.

use crate::admission::{aggregator_job, server_job};
use crate::http::{Request, Response};
use crate::report::{About, JobReport, Report, Which};
use crate::shard::{Command, Handle, Refused, epoch_is_over};
use crate::streams::Streamed;
use crate::{Config, Role, proof};
use penstock_aggregation::{Limits, VERSION};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(crate) struct Control {
    config: Config,
    here: SocketAddr,
    /// The daemon's name in proofs.
    daemon: String,
    shards: Mutex<Vec<Handle>>,
    registry: Mutex<Registry>,
    draining: AtomicBool,
    forgotten: AtomicU64,
    started: Instant,
}

/// The open jobs. Locked while one is opened or closed, so that all shards see the same order.
#[derive(Default)]
struct Registry {
    jobs: BTreeMap<u32, (u16, Vec<u8>)>,
    /// The newest epoch of each job that was closed, for the last [`CLOSED`] jobs. A server must never open an epoch twice,
    /// since it would have forgotten what it committed.
    closed: HashMap<u32, u16>,
    closed_order: VecDeque<u32>,
}

impl Control {
    pub(crate) fn new(config: Config, here: SocketAddr, daemon: String, shards: Vec<Handle>) -> Control {
        Control {
            config,
            here,
            daemon,
            shards: Mutex::new(shards),
            registry: Mutex::default(),
            draining: AtomicBool::new(false),
            forgotten: AtomicU64::new(0),
            started: Instant::now(),
        }
    }

    /// Answers a request over HTTP: one that opens or closes a job needs a proof, where there is a secret.
    pub(crate) fn handle(&self, request: &Request) -> Response {
        let Request { method, path, body, .. } = request;
        if let (Some(secret), "PUT" | "DELETE") = (&self.config.secret, method.as_str()) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
            let what = (method.as_str(), path.as_str(), &body[..]);
            let (time, proof) = (request.header(proof::TIME_HEADER), request.header(proof::PROOF_HEADER));
            if let Err(reason) = proof::check(secret, &self.daemon, now, what, time, proof) {
                return Response::error(401, reason);
            }
        }
        self.answer(method, path, body)
    }

    /// Answers a request of somebody who may open and close jobs.
    pub(crate) fn answer(&self, method: &str, target: &str, body: &[u8]) -> Response {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        match (method, &parts[..]) {
            ("GET", [""]) => self.about(),
            ("GET", ["jobs"]) => {
                let from = query.split('&').find_map(|pair| pair.strip_prefix("from="));
                match from.map_or(Ok(0), str::parse) {
                    Ok(from) => told(self.page(from)),
                    Err(_) => Response::error(400, "say from which job on: GET /jobs?from=N"),
                }
            }
            ("GET", ["jobs", job]) => match job.parse::<u32>() {
                Ok(job) if self.registry().jobs.contains_key(&job) => told(self.tell(vec![job], None)),
                _ => Response::error(404, format!("job {job} is not open here")),
            },
            ("GET", ["metrics"]) => match self.report(&Which::All) {
                Some(report) => Response {
                    status: 200,
                    content_type: "text/plain; version=0.0.4; charset=utf-8",
                    body: report.prometheus(&self.what()),
                },
                None => Response::error(503, "a shard does not answer"),
            },
            ("PUT" | "DELETE", ["jobs", job]) => {
                let Ok(job) = job.parse::<u32>() else {
                    return Response::error(400, format!("{job:?} is not the number of a job: 0 to 4294967295 are"));
                };
                if method == "PUT" { self.open(job, body) } else { self.close(job, query) }
            }
            (_, ["" | "jobs" | "metrics"] | ["jobs", _]) => {
                Response::error(405, format!("{method} is not possible on {path}"))
            }
            _ => Response::error(404, "there are /, /jobs, /metrics and /jobs/{job}"),
        }
    }

    /// What `GET /jobs?from=` says: of the jobs with this number or a higher one, as many as an answer of bounded length has room for.
    fn page(&self, from: u32) -> Option<Value> {
        let (mut jobs, mut bytes, mut next) = (Vec::new(), 0, None);
        for (job, (_, body)) in self.registry().jobs.range(from..) {
            bytes += body.len();
            if bytes > PAGE_BYTES && !jobs.is_empty() {
                next = Some(*job);
                break;
            }
            jobs.push(*job);
        }
        self.tell(jobs, next)
    }

    /// The counters, those of some jobs, and the number of the first job that is on the next page.
    fn tell(&self, jobs: Vec<u32>, next: Option<u32>) -> Option<Value> {
        let mut value = self.report(&Which::These(jobs))?.json();
        value["next"] = json!(next);
        Some(value)
    }

    pub(crate) fn limits(&self) -> Limits {
        self.config.limits
    }

    /// Opens no new jobs from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// What `GET /jobs?from=` says.
    pub(crate) fn jobs(&self, from: u32) -> Option<String> {
        self.page(from).map(|jobs| jobs.to_string())
    }

    /// A worker behind a stream pushes or pulls.
    pub(crate) fn stream(&self, name: &str, call: Streamed) {
        let back = self.shards()[0].send(Command::Stream(name.to_owned(), call));
        if let Some(command) = back {
            command.refuse();
        }
    }

    /// Whether no sum is incomplete; `None`: a shard does not answer.
    pub(crate) fn is_idle(&self) -> Option<bool> {
        let report = self.report(&Which::All)?;
        Some(report.jobs.iter().all(|job| {
            // A server also waits until all workers have their results.
            let untold = job.server.as_ref().is_some_and(|server| {
                // The server's part of a worker behind a stream has results before that worker has.
                server.waiting + server.untold > 0
                    || match &server.held {
                        Some(held) => held.bytes > 0,
                        None => server.credit.wrapping_sub(server.ack).wrapping_add(1) < job.window,
                    }
            });
            job.waiting_slots == 0 && !untold
        }))
    }

    /// Closes jobs from which nothing has come for long.
    pub(crate) fn forget_silent(&self) {
        let Some(report) = self.report(&Which::All) else {
            return;
        };
        let limit = u64::try_from(self.config.forget_after.as_nanos()).unwrap_or(u64::MAX);
        // A worker that waits asks nothing more. But calls of clients that have died wait, too.
        let limit_of = |job: &JobReport| {
            let waits = job.server.as_ref().is_some_and(|server| server.waiting > 0);
            if waits { limit.saturating_mul(WAITING) } else { limit }
        };
        for job in report.jobs.iter().filter(|job| job.silent_ns() > limit_of(job)) {
            let mut registry = self.registry();
            // The job may have been opened again in the meantime.
            if registry.jobs.get(&job.job).is_some_and(|(epoch, _)| *epoch == job.epoch) {
                let silent = job.silent_ns() as f64 / 1e9;
                let why = format!(
                    "job {} (epoch {}) is closed: nothing was asked for {silent:.0} s: raise --forget-after, and open the next epoch",
                    job.job, job.epoch
                );
                self.close_everywhere(&mut registry, job.job, &why);
                self.forgotten.fetch_add(1, Ordering::Relaxed);
                log::warn!(
                    "penstock: job {} (epoch {}) is closed: nothing was heard for {silent:.0} s",
                    job.job,
                    job.epoch
                );
            }
        }
    }

    pub(crate) fn stop(&self) {
        self.shards().iter_mut().for_each(Handle::join);
    }

    fn open(&self, job: u32, body: &[u8]) -> Response {
        if self.is_draining() {
            return Response::error(503, "this node is about to end and opens no jobs");
        }
        let read = match self.config.role {
            Role::Aggregator => aggregator_job(job, body, self.here),
            Role::Server => server_job(job, body, self.here),
        };
        let admitted = match read {
            Ok(admitted) => admitted,
            Err(reason) => return Response::error(400, reason),
        };
        let epoch = admitted.common.epoch;
        let mut registry = self.registry();
        let opened = json!({ "shards": self.config.shards, "udp": self.here.to_string() });
        let newer = |known: u16| (known.wrapping_sub(epoch) as i16) > 0;
        match registry.jobs.get(&job) {
            Some((known, with)) if *known == epoch && with == body => return Response::json(200, &opened),
            Some((known, _)) if *known == epoch => {
                return Response::error(
                    409,
                    format!("epoch {epoch} of job {job} is open with other contents: open the next epoch"),
                );
            }
            Some((known, _)) if newer(*known) => {
                return Response::error(
                    409,
                    format!("epoch {known} of job {job} is newer than {epoch} and already here"),
                );
            }
            _ => {}
        }
        if self.config.role == Role::Server
            && let Some(known) = registry.closed.get(&job)
            && (newer(*known) || *known == epoch)
        {
            return Response::error(
                409,
                format!(
                    "epoch {known} of job {job} is over, and a server does not begin an epoch twice: open a later one"
                ),
            );
        }
        let shards = self.shards();
        for (at, shard) in shards.iter().enumerate() {
            let (answer, outcome) = sync_channel(1);
            shard.send(Command::Open(Box::new(admitted.clone()), answer));
            let refused = match outcome.recv_timeout(ANSWER) {
                Ok(Ok(())) => continue,
                Ok(Err(Refused::Malformed(reason))) => Response::error(400, reason),
                Ok(Err(Refused::Conflict(reason))) => Response::error(409, reason),
                Err(_) => Response::error(503, "a shard does not answer"),
            };
            // All shards have the same limits and jobs, so the first one refuses for all. If a shard is gone, or so late that
            // it may still open the job, the job is closed everywhere, and so is the epoch before it, which some shards have
            // already dropped.
            if at > 0 || refused.status == 503 {
                drop(shards);
                self.close_everywhere(&mut registry, job, &epoch_is_over(job, epoch));
            }
            return refused;
        }
        drop(shards);
        registry.jobs.insert(job, (epoch, body.to_vec()));
        log::info!("penstock: job {job} (epoch {epoch}) is open");
        Response::json(201, &opened)
    }

    fn close(&self, job: u32, query: &str) -> Response {
        let epoch = query.split('&').find_map(|pair| pair.strip_prefix("epoch="));
        let Some(epoch) = epoch.and_then(|text| text.parse::<u16>().ok()) else {
            return Response::error(400, "say which epoch: DELETE /jobs/{job}?epoch=E");
        };
        let mut registry = self.registry();
        match registry.jobs.get(&job) {
            None => Response::error(404, format!("job {job} is not open here")),
            Some((known, _)) if *known != epoch => {
                Response::error(409, format!("job {job} is in epoch {known}, not {epoch}"))
            }
            Some(_) => {
                self.close_everywhere(&mut registry, job, &epoch_is_over(job, epoch));
                log::info!("penstock: job {job} (epoch {epoch}) is closed");
                Response::json(200, &json!({ "closed": job }))
            }
        }
    }

    fn close_everywhere(&self, registry: &mut Registry, job: u32, why: &str) {
        for shard in self.shards().iter() {
            let (answer, closed) = sync_channel(1);
            shard.send(Command::Close(job, why.to_owned(), answer));
            let _ = closed.recv_timeout(ANSWER);
        }
        if let Some((epoch, _)) = registry.jobs.remove(&job)
            && registry.closed.insert(job, epoch).is_none()
        {
            registry.closed_order.push_back(job);
            if registry.closed_order.len() > CLOSED
                && let Some(oldest) = registry.closed_order.pop_front()
            {
                registry.closed.remove(&oldest);
            }
        }
    }

    fn report(&self, which: &Which) -> Option<Report> {
        let mut all = Report::default();
        let asked: Vec<_> = {
            let shards = self.shards();
            let ask = |shard: &Handle| {
                let (answer, report) = sync_channel(1);
                shard.send(Command::Report(which.clone(), answer));
                report
            };
            shards.iter().map(ask).collect()
        };
        for report in asked {
            all.merge(report.recv_timeout(ANSWER).ok()?);
        }
        all.jobs.sort_by_key(|job| job.job);
        Some(all)
    }

    fn what(&self) -> About {
        About {
            role: self.config.role.name(),
            version: env!("CARGO_PKG_VERSION"),
            shards: self.config.shards,
            draining: self.is_draining(),
            forgotten: self.forgotten.load(Ordering::Relaxed),
            limits: self.config.limits,
        }
    }

    fn about(&self) -> Response {
        let Config { role, shards, limits, secret, offloads, drop, .. } = &self.config;
        let mut about = json!({
            "penstock": env!("CARGO_PKG_VERSION"),
            "protocol": VERSION,
            "role": role.name(),
            "daemon": self.daemon,
            "shards": shards,
            "udp": self.here.to_string(),
            "limits": { "jobs": limits.jobs, "slots": limits.slots, "memory_bytes": limits.memory_bytes },
            "jobs": self.registry().jobs.iter().map(|(job, (epoch, _))| json!({ "job": job, "epoch": epoch })).collect::<Vec<_>>(),
            "draining": self.is_draining(),
            "secret": secret.is_some(),
            "offloads": offloads,
            "uptime_s": self.started.elapsed().as_secs_f64(),
        });
        if let Some((rate, seed)) = drop {
            about["drop"] = json!({ "rate": rate, "seed": seed });
        }
        Response::json(200, &about)
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn shards(&self) -> MutexGuard<'_, Vec<Handle>> {
        self.shards.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn told(jobs: Option<Value>) -> Response {
    jobs.map_or_else(|| Response::error(503, "a shard does not answer"), |jobs| Response::json(200, &jobs))
}

/// How many bytes of bodies, with which jobs were opened, one answer tells of, if it is not a single job. Of a node an answer has some
/// 600 bytes and a body 30 to 80, so it has 5 MB at most.
const PAGE_BYTES: usize = 256 << 10;
/// How long to wait for a shard's answer. A shard answers between batches; this is a thousand of them.
const ANSWER: Duration = Duration::from_secs(5);
/// How many times --forget-after a job may be silent while workers behind streams wait.
const WAITING: u64 = 10;
/// How many closed jobs a server remembers: 8 bytes each, and their order.
const CLOSED: usize = 65536;
