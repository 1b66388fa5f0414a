-- Scripts on workers and what is left for them. The key layout and the prelude are in ledger.lua.

--@ report
-- '', worker, facts (JSON), ms after which a silent worker is forgotten. Returns 1 if it is to retire.
even_when_full()
call('HSET', key.workers, ARGV[2], now .. '|' .. ARGV[3])
call('PEXPIRE', key.workers, ARGV[4])
return call('SISMEMBER', key.retiring, ARGV[2])

--@ leave
-- '', worker. It has ended.
call('HDEL', key.workers, ARGV[2])
call('SREM', key.retiring, ARGV[2])
return 1

--@ retire
-- '', workers... Those that do not report are not noted, so the set does not grow.
even_when_full()
for place = 2, #ARGV do
  if call('HEXISTS', key.workers, ARGV[place]) == 1 then call('SADD', key.retiring, ARGV[place]) end
end
return 1

--@ fleet
-- '', ms. Returns (worker, ms since its report, facts)... of those that reported in this time; forgets the
-- others.
even_when_full()
local found, all = {}, call('HGETALL', key.workers)
for place = 1, #all, 2 do
  local ms, facts = string.match(all[place + 1], '^(%d+)|(.*)$')
  -- One from the future reported before the clock was set back: who lives reports again at once.
  if math.abs(now - ms) > tonumber(ARGV[2]) then
    call('HDEL', key.workers, all[place])
    call('SREM', key.retiring, all[place])
  else
    found[#found + 1] = {all[place], math.max(0, now - ms), facts}
  end
end
return found

--@ turn
-- '', fingerprint, autoscaler, ms. Returns 1 if it may start and retire workers of the model now: what another
-- did less than this ago may not show yet. Twice: it has the turn already.
even_when_full()
local name = 'turn:' .. ARGV[2]
local whose, until_ = string.match(call('HGET', key.work, name) or '', '^(.*)|(%d+)$')
-- A turn that ends too late was taken before the clock was set back.
local left = tonumber(until_ or 0) - now
if whose and whose ~= ARGV[3] and left > 0 and left <= 10 * ARGV[4] then return 0 end
call('HSET', key.work, name, ARGV[3] .. '|' .. string.format('%.0f', now + ARGV[4]))
return 1

--@ due
-- '', most. Returns (ms until its deadline, fingerprint, rows left, prompt tokens left) of the jobs that expire
-- first, planned ones only.
local found = {}
local jobs = call('ZRANGE', key.deadlines, 0, ARGV[2] - 1, 'WITHSCORES')
local prefix = string.match(key.control, '^({.-}:)')
for place = 1, #jobs, 2 do
  local name = jobs[place]
  local rows = call('HGET', key.open_requests, name)
  local facts = call('HMGET', prefix .. 'job:' .. name, 'fingerprint', 'left_tokens')
  if rows and facts[1] then
    found[#found + 1] = {math.floor(jobs[place + 1] - now), facts[1], math.max(0, tonumber(rows)),
      tonumber(facts[2] or 0)}
  end
end
return found

--@ waiting
-- '', fingerprint, most tenants. Returns the requests that can be claimed, those that are still to be fed, and ms
-- since the oldest was enqueued, -1 if none: of the suspects and of the tenants whose turns are next. One
-- entry may be stale, and older.
local count = math.max(0, call('HLEN', key.requests) - call('ZCARD', key.leases))
local unfed = math.max(0, tonumber(call('HGET', key.work, 'unfed:' .. ARGV[2]) or 0))
local oldest
local function look(list)
  local ms = tonumber(string.match(call('LINDEX', list, 0) or '', '^%d+'))
  if ms and (not oldest or ms < oldest) then oldest = ms end
end
if count > 0 then
  look(key.suspects)
  for _, tenant in ipairs(call('ZRANGE', key.turns, 0, ARGV[3] - 1)) do
    for _, bucket in ipairs(buckets) do look(queue[bucket] .. ':' .. tenant) end
  end
end
return {count, unfed, oldest and math.max(0, now - oldest) or -1}
