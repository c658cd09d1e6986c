//! Snapshots of this host in the shared store.
//!
//! [`RemoteStore`] is this host's view of the store: its requests, its master keys, its fetcher
//! process and its state in the data directory (`<home>/store/`). No other module of this crate
//! depends on this one.

mod error;
mod fetch_grants;
mod fetcher;
mod fetcher_process;
mod key_file;
mod module_book;
mod remote_store;
mod settings;
mod stored_modules;
mod working_set;

pub use error::RemoteError;
pub use fetch_grants::{FetchGrant, GrantDirectory, GrantSocket, GrantedLayer, LayerOrigin};
pub use fetcher::{
    FETCHER_ARGUMENT, FetchService, FetcherSettings, KEY_BROKER_ARGUMENT, fetcher_main,
    key_broker_main,
};
pub use fetcher_process::{FETCHER_WATCH_INTERVAL, FetcherProcess};
pub use remote_store::pull::{FoundSnapshot, MANIFEST_PART, MemoryPull, PulledFile, RECORD_PART};
pub use remote_store::push::{PushRequest, Pushed};
pub use remote_store::template_files::StoredTemplate;
pub use remote_store::{LOCAL_TENANT, RemoteStore};
pub use settings::{LastStore, RemoteSettings, STORE_TIMEOUT};
pub use stored_modules::StoredModules;
pub use working_set::first_chunks;
