//! Whether the marks, the queues and the sums say the same, when nobody is there any more.

use super::{Item, Mark, Place, Policy};
use crate::primitive::epoch::Guard;
use crate::primitive::plain::Ordering;
use std::collections::HashMap;

/// A slot that is in the cache, as an audit needs to know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Audited {
    pub(crate) hash: u32,
    pub(crate) mark: Mark,
    /// What it weighs by what is in it.
    pub(crate) weight: u32,
}

impl Policy {
    /// Takes all elements out, since the cache ends, and tells `wrong` what does not agree with the slots that are there.
    pub(crate) fn audit(&mut self, slots: &[Audited], guard: &Guard, wrong: &mut impl FnMut(String)) {
        let mut compare = |what: &str, told: u64, found: u64| {
            if told != found {
                wrong(format!("{what}: {told} by the count, {found} by the slots"));
            }
        };
        let weigh = |of: &mut dyn Iterator<Item = u32>| of.map(u64::from).sum::<u64>();
        let queued = || slots.iter().filter(|slot| slot.mark.is_queued());
        // Relaxed: `&mut`: nobody else is there, here and below.
        compare(
            "weight",
            self.weight.0.load(Ordering::Relaxed),
            weigh(&mut slots.iter().map(|slot| slot.weight)),
        );
        for (number, part) in self.parts.iter().enumerate() {
            let small = queued().filter(|slot| slot.mark.place() == Place::Small);
            let own = small.filter(|slot| self.part_number(slot.hash) == number);
            let short = part.tally.0.small.load(Ordering::Relaxed);
            compare("weight in a small queue", short, weigh(&mut own.map(|slot| slot.mark.weight())));
        }

        // Two slots may have the same item: as many elements as slots.
        let mut elements: HashMap<Item, usize> = HashMap::new();
        for part in &self.parts {
            for queue in [&part.small, &part.main] {
                while let Some(item) = queue.pop(guard) {
                    *elements.entry(Item(item)).or_default() += 1;
                }
            }
            let candidate = part.tally.0.candidate.load(Ordering::Relaxed);
            if candidate != 0 {
                *elements.entry(Item(candidate).bare()).or_default() += 1;
            }
        }
        let mut namesakes: HashMap<Item, usize> = HashMap::new();
        queued().for_each(|slot| *namesakes.entry(Item::new(slot.hash, slot.mark)).or_default() += 1);
        for Audited { hash, mark, weight } in slots {
            let item = Item::new(*hash, *mark);
            match mark.place() {
                Place::Small | Place::Main => {
                    let (there, wanted) = (elements.get(&item).copied().unwrap_or(0), namesakes[&item]);
                    // An element of a former life may look the same by chance, which only a user's cache lives long enough for.
                    if there < wanted || cfg!(test) && there > wanted {
                        wrong(format!(
                            "slot {hash:08x}: {there} elements of {wanted} in the queues, {mark:?}"
                        ));
                    }
                    if mark.weight() != *weight {
                        wrong(format!("slot {hash:08x}: weighs {weight}, and {} by its mark", mark.weight()));
                    }
                }
                Place::Out if !self.is_bounded() => {}
                place @ (Place::Out | Place::Gone) => {
                    wrong(format!("slot {hash:08x}: is in the cache, and {place:?} by its mark"));
                }
            }
        }
    }
}
