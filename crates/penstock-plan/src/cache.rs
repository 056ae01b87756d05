//! A cache of plans: [`Plans`].

use std::{num::NonZeroUsize, sync::Arc};

use lru::LruCache;

use crate::{Algorithm, PlanError, Request, Steps, steps};

/// Keeps the plans of recent requests. Training repeats the same few sizes in every step, so the engine finds nearly every
/// plan here.
#[derive(Debug)]
pub struct Plans {
    plans: LruCache<(Request, Algorithm), Arc<Steps>>,
}

impl Plans {
    /// A cache that keeps `capacity` plans and drops the least recently used one. A plan takes some 100 to 200 bytes a step:
    /// 10 KiB for a ring all-reduce over 16 ranks.
    #[must_use]
    pub fn new(capacity: NonZeroUsize) -> Plans {
        Plans { plans: LruCache::new(capacity) }
    }

    /// What [`steps`] returns for the same arguments. Errors are not kept.
    ///
    /// # Errors
    /// Those of [`steps`].
    pub fn steps(&mut self, request: &Request, algorithm: Algorithm) -> Result<Arc<Steps>, PlanError> {
        let key = (request.clone(), algorithm);
        if let Some(plan) = self.plans.get(&key) {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(steps(request, algorithm)?);
        self.plans.put(key, Arc::clone(&plan));
        Ok(plan)
    }
}

impl Default for Plans {
    /// Keeps [`Plans::DEFAULT_CAPACITY`] plans.
    fn default() -> Plans {
        Plans::new(Plans::DEFAULT_CAPACITY)
    }
}

impl Plans {
    /// More than the distinct buckets and collectives of a large model's step (a guess), in a few MiB.
    pub const DEFAULT_CAPACITY: NonZeroUsize = NonZeroUsize::new(256).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Collective, Placement};

    fn request(bytes: u64) -> Request {
        Request {
            collective: Collective::AllReduce,
            world: 4,
            rank: 1,
            placement: Placement::separate_hosts(4),
            bytes,
            element_bytes: 4,
            splits: None,
            segment_bytes: 4096,
        }
    }

    /// The same request gives the same plan, not an equal one; the one unused for longest goes first.
    #[test]
    fn remembers_the_most_recent_plans() {
        let mut plans = Plans::new(NonZeroUsize::new(2).unwrap());
        let first = plans.steps(&request(4096), Algorithm::Ring).unwrap();
        assert_eq!(*first, steps(&request(4096), Algorithm::Ring).unwrap());
        let second = plans.steps(&request(4096), Algorithm::Direct).unwrap();
        assert!(Arc::ptr_eq(&first, &plans.steps(&request(4096), Algorithm::Ring).unwrap()));
        plans.steps(&request(8192), Algorithm::Ring).unwrap();
        assert!(Arc::ptr_eq(&first, &plans.steps(&request(4096), Algorithm::Ring).unwrap()));
        assert!(!Arc::ptr_eq(&second, &plans.steps(&request(4096), Algorithm::Direct).unwrap()));
    }

    /// Groups of a process may have as many ranks on other hosts: each placement has its plan.
    #[test]
    fn remembers_placements_apart() {
        let mut plans = Plans::default();
        let mut on = |hosts: &[u32]| {
            let request = Request { placement: Placement::new(hosts), ..request(4096) };
            plans.steps(&request, Algorithm::Hierarchical).unwrap()
        };
        let blocks = on(&[0, 0, 1, 1]);
        assert_ne!(blocks, on(&[0, 1, 0, 1]));
        assert!(Arc::ptr_eq(&blocks, &on(&[5, 5, 2, 2])));
    }

    /// A request without a plan is refused each time, and takes no place.
    #[test]
    fn does_not_remember_errors() {
        let mut plans = Plans::new(NonZeroUsize::new(1).unwrap());
        let kept = plans.steps(&request(4096), Algorithm::Ring).unwrap();
        assert!(plans.steps(&request(4096), Algorithm::Tree).is_err());
        assert!(Arc::ptr_eq(&kept, &plans.steps(&request(4096), Algorithm::Ring).unwrap()));
    }
}
