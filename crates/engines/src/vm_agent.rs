//! Client of the agent in a microVM, for the engine itself.

use jiffy_agent_client::AgentClient;
use jiffy_microvm_engine::MicroVm;
use jiffy_proto::agent::ENVD_PORT;
use std::io;

/// Returns a client of the agent in `vm`.
pub fn agent(vm: &MicroVm) -> AgentClient {
    let connector = vm.connector();
    AgentClient::new(move || {
        let connector = connector.clone();
        async move { connector.connect(ENVD_PORT).await.map_err(io::Error::other) }
    })
}
