//! The machine under a virtual clock: see [`world`] for what holds on every frame of every test here.

mod delivery;
mod life;
mod network;
mod outstanding;
mod pauses;
mod rates;
mod refusals;
mod streams;
mod world;
